"""Average models instead of gradients: the seam, and local SGD; schemes are in their papers' rooms."""

from sparsync.averaging.averager import Averager, LocalSgd

__all__ = ["Averager", "LocalSgd"]
