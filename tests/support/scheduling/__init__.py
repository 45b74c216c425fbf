"""A scheduler without a model."""
