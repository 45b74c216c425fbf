"""The choice of tokens as it was written first: rows grouped on the host, edits as index lists, one sort of everything.
What the device's choice must equal to the id."""
