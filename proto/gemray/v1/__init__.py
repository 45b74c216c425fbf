"""Version 1: `generation.proto` and the modules generated from it."""
