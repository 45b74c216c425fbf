"""Random chats with a prefix cache, held against an engine without; `python -m support.multi_turn` runs many."""
