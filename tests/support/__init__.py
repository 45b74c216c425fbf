"""What several tests share: tiny checkpoints, process gangs, oracles."""
