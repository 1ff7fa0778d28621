"""The papers' training tasks; entry points make each class a workload of ``sparsync train``."""
