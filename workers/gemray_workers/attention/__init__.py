"""Attention backends: what each can do, and which one is chosen."""
