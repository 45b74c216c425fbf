"""The kernels in plain PyTorch, which say what the others compute."""
