"""Text in and out: tokenizing, chat templates, incremental detokenizing, stop strings."""
