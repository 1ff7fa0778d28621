"""The choice of a backend: every kernel call is dispatched by the dtype and device of its tensors.

On the CPU they go to C++ (``kernels/native.py``) if that was built, on a GPU to Triton
(``kernels/triton``) if that is installed, and everything else to PyTorch (``kernels/reference.py``).
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.kernels import native, reference

__all__ = ["backend_of"]

# elements from which a slow CPU kernel deserves a warning (a pass takes 1 ms)
_LARGE: Final = 1 << 17


def backend_of(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Return the module that takes these tensors: ``native``, ``triton`` or ``reference``.

    Args:
        tensors: at least one.
        dtype: the only one that compiled kernels take here.
    """
    devices = {tensor.device.type for tensor in tensors}
    if any(tensor.dtype is not dtype for tensor in tensors) or len(devices) > 1:
        return reference
    if devices == {"cpu"}:
        if native.chosen() != "torch":
            return native
        if native.EXTENSION is None and tensors[0].numel() >= _LARGE:
            _warn_that_kernels_are_slow()
    elif devices == {"cuda"}:
        return _triton() or reference
    return reference


@functools.cache
def _triton() -> Any:
    """Return the Triton backend, imported for the first CUDA tensor; None without Triton."""
    backend = importlib.import_module("sparsync.kernels.triton")
    return backend if backend.installed() else None


@functools.cache  # once per process
def _warn_that_kernels_are_slow() -> None:
    logging.getLogger("sparsync").warning(
        "sparsync was installed without its native kernels, so selection on the CPU is about ten times "
        "slower: install a C++ compiler (g++ or clang++) and then sparsync again, with pip's -v to see "
        "what the build says"
    )
