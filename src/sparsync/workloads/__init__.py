"""Models and data to train on: a byte-level transformer and Python's own source text."""
