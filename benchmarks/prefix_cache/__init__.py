"""What the prefix cache finds under memory pressure, and what a hit saves."""
