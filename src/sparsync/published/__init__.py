"""One package per paper, with its algorithm and settings; training with the defaults imports none.

The docstring of each package is the paper's page in the documentation.  It maps the paper's terms to
names in this library, shows how to run the algorithm, gives a reason for every deviation, and links to
code and measurements elsewhere.
"""
