"""The engine step and the state that lives on every rank."""
