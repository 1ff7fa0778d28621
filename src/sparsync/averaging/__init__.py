"""Averaging models instead of gradients: the base class, and local SGD.

WAGMA-SGD is in ``sparsync.published.wagma``, gossip and Eager-SGD are in
``sparsync.published.baselines``, and the outer step is in ``sparsync.updates``.
"""

from sparsync.averaging.averager import Averager, LocalSgd

__all__ = ["Averager", "LocalSgd"]
