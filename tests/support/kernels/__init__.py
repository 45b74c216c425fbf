"""Kernels compared and compiled."""
