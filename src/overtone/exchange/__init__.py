"""One round: the exchanged tensors, the messages, and how the replicas agree on them. Imports torch only."""
