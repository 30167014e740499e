"""What ``tools/torch_own_tests.py`` is made of: PyTorch's own test files with another prefix."""
