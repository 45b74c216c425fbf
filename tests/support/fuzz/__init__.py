"""Random and mutated requests on the handlers, and raw bytes on the port: no crash, no hang, no INTERNAL."""
