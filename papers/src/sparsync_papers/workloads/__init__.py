"""The papers' training tasks: each class is a workload of ``sparsync train``, by an entry point."""
