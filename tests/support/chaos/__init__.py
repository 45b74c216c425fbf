"""Faults under load: a served family whose ranks, gangs and servers are killed and stopped while clients stream."""
