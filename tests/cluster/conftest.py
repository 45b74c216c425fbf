"""Fixtures of the front end's tests; the gang's own are in gang/conftest.py."""

from support.cluster.text import tokenizer  # noqa: F401 - a fixture
