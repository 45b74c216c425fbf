"""The kernels in Triton, for CUDA devices."""
