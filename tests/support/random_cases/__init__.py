"""Random engines under random load, held against plain decoding; `python -m support.random_cases` runs thousands."""
