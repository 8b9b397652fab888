"""Checkpoints: their file format, the index of those that exist, and the writer."""
