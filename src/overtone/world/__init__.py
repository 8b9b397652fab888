"""A world of processes: how replicas join one, and how they wait for each other."""
