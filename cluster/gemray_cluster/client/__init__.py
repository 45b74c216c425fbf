"""A gRPC client for the command line."""
