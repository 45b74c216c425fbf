"""Ray: a session, placement, and ranks as actors."""
