"""A drafter on a worker, and device, of its own: the messages, the target's end and the drafter's end."""
