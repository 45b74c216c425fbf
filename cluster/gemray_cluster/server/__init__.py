"""The gRPC front end: requests in, messages out, health, limits, authentication."""
