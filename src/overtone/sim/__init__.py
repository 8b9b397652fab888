"""K virtual replicas in one process, on a virtual network."""
