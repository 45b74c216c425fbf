"""Whole engines, their requests and drafters, for tests."""
