"""Drafters behind one protocol."""
