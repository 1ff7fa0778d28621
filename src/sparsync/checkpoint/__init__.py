"""Checkpoints of every rank's residual and of all shared state, written completely or not at all.

::

    folder/000007-step-00000300/sparsync-rank-0-of-4.pt     this rank's state (``sync.state_dict()``)
                                sparsync-rank-1-of-4.pt     ...
                                shared.pt                   model, optimizer, ...: from rank 0
           000008-step-00000400/...

A file appears under its name only once it is completely on disk, and a folder is a checkpoint only if it
contains the files of all ranks.  The last checkpoint thus survives a crash or a full disk at any moment.
"""

from sparsync.checkpoint.reshard import reshard
from sparsync.checkpoint.save_load import Saveable, load, load_states, save, save_state

__all__ = ["Saveable", "load", "load_states", "reshard", "save", "save_state"]
