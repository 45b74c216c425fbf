"""Grammars that an answer must follow: compiled by llguidance, tracked by the ids that were decided."""
