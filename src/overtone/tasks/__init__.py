"""Tasks: a model, its data and its metric."""
