"""The settings of a server: flags, variables and file."""
