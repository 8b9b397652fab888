"""One round: what is exchanged, in which messages, and how replicas agree on it. Imports torch only."""
