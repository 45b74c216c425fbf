"""The MTP assistant: a small Q-only decoder that reads the target's KV cache (spec section 4)."""
