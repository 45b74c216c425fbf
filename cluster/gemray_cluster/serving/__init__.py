"""A whole server: Ray, gang and gRPC service, started and ended together."""
