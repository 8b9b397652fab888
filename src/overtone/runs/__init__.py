"""Whole runs: configuration, training loop, checkpoints, run log, processes."""
