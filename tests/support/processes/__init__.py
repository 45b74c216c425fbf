"""Process gangs."""
