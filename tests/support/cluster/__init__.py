"""Gangs, servers and clients without a model."""
