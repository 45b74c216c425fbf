"""Checkpoints, tokenizers and weight files made on the spot."""
