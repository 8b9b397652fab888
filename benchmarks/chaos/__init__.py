"""A run in a store under disturbances, as a figure. `python -m chaos`, see __main__.py."""
