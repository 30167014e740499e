"""Random models, and each step of ours beside PyTorch's on them. Shared by tests and tools."""
