"""The door to the hot loops.  Callers import from here and never from a backend.

Today every kernel is the PyTorch specification (``kernels/torch.py``); faster backends register
behind the same names and must be bit-equal to it.
"""

from sparsync.kernels.torch import (
    above,
    accumulate,
    key_range,
    magnitude_keys,
    merge,
    scatter_,
    top,
)

__all__ = ["above", "accumulate", "key_range", "magnitude_keys", "merge", "scatter_", "top"]
