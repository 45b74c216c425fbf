"""Schemas of every kind, and what an engine answers when it is held to them."""
