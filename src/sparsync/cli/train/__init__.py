"""``sparsync train``: one training run per algorithm, all from the same weights and on the same data."""
