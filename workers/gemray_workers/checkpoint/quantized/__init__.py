"""Quantized checkpoints: what their configs say, as one recipe."""
