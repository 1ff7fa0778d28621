"""One room per paper: its algorithm, settings and words.  Training with the defaults imports none.

The docstring of a room is the paper's page: its terms and where they are here, how to run it, every
difference with its reason, where the rest is, and the figures.
"""
