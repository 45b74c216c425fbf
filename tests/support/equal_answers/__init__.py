"""Random requests over gRPC to a busy server in exact numerics, compared with a server that has nothing else to do."""
