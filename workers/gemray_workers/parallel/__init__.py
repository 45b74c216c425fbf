"""Process groups and vocabulary shards."""
