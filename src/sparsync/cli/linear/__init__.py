"""``sparsync linear``: linear models on sparse data, once per exchange, on the same rows."""

from sparsync.cli.linear.command import train_linear
from sparsync.cli.linear.report import LinearResult
from sparsync.cli.linear.settings import LinearSettings

__all__ = ["LinearResult", "LinearSettings", "train_linear"]
