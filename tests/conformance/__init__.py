"""The checks of PyTorch's own optimizer test framework, run over the classes of oxidion."""
