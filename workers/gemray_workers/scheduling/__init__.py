"""Which sequence computes how many tokens in a step."""
