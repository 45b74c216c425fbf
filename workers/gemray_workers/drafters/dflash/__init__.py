"""The DFlash drafter: a block of masked tokens denoised in one pass over injected context (spec section 5)."""
