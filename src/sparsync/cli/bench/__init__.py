"""``sparsync bench``: collectives, kernels or selectors, side by side."""

from sparsync.cli.bench.command import BenchSettings, bench
from sparsync.cli.bench.rows import Row

__all__ = ["BenchSettings", "Row", "bench"]
