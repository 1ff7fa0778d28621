"""``sparsync train``: one training per algorithm, on the same data from the same initial weights."""
