"""``sparsync train``: one training per algorithm, on the same data from the same initial weights."""

from sparsync.cli.train.command import train
from sparsync.cli.train.results import TrainResult
from sparsync.cli.train.settings import TrainSettings

__all__ = ["TrainResult", "TrainSettings", "train"]
