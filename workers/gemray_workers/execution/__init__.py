"""What a cycle computes over: the slots, the rows of a plan, and what verification makes of them."""
