"""Many streams at one time on a real server: every request is accounted for, and memory stays flat."""
