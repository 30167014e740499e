"""Tests of the mirror of torch.ao."""

collect_ignore = ["tutorials"]  # scripts, which test_tutorials runs
