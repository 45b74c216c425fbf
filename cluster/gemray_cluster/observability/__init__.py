"""Metrics and one log line for each request."""
