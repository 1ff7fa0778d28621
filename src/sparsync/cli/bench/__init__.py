"""``sparsync bench``: collectives, kernels or selectors, side by side."""
