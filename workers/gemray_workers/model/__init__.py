"""The Gemma 4 text decoder, sharded by tensor parallelism."""
