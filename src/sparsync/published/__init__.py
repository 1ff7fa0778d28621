"""One room per paper, with its algorithm, settings and terms; training with the defaults imports none.

The docstring of a room is the paper's page.  It maps the paper's terms to names in this library, shows
how to run the algorithm, gives a reason for every deviation, and points to everything else.
"""
