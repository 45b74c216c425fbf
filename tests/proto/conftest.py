"""Fixtures of the client's tests."""

from support.cluster.text import tokenizer  # noqa: F401 - a fixture
