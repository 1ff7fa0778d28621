"""``sparsync linear``: train linear models on sparse data, once per exchange, on the same rows."""
