"""The papers' training tasks: each class is a workload of ``sparsync train``, through an entry point."""
