"""Plain implementations that results are compared with."""
