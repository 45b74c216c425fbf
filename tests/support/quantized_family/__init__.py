"""The embedded family quantized in every format: held-out loss, size, and acceptance of its drafters."""
