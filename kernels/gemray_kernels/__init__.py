"""Kernels of gemray: each Triton kernel beside its plain-PyTorch reference of the same signature."""
