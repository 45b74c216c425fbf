"""What products with packed weights take, and in which tiles."""
