"""Checkpoints of a run: their format, their index on disk, and who writes them."""
