"""Who averages models with whom, and when: one scheme per file."""

from sparsync.averaging.allreduce import AllreduceAverage
from sparsync.averaging.base import Averager
from sparsync.averaging.local import LocalSgd

__all__ = ["AllreduceAverage", "Averager", "LocalSgd"]
