"""The processes of a run: how replicas join them, and how they wait for each other."""
