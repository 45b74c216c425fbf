"""One rank of a gang: its plan, its loading, its life."""
