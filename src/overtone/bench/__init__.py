"""Measurements that users can repeat: everything as ratios within one run."""
