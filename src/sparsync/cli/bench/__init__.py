"""``sparsync bench``: compare collectives, kernels or selectors."""
