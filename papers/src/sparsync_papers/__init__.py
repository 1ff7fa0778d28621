"""The papers' models, data and reproductions, as commands and workloads of ``sparsync``."""
