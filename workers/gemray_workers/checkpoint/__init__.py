"""Streaming Hugging Face checkpoints into each rank's shard."""
