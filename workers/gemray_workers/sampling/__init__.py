"""Choosing tokens: logit edits, filters, keyed noise, logprobs."""
