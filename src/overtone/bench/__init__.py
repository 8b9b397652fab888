"""Measurements that users can repeat. Results are ratios within one run, so that machines can be compared."""
