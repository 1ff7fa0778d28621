"""The hot loops, dispatched by the dtype and device of their tensors.

Callers import from here and never from a backend.  Float32 on the CPU goes to C++ (``native.py``) if
that was built, on a GPU to Triton (``triton.py``) if that is installed, and everything else to PyTorch
(``reference.py``), which describes the functions.  It is the specification, to which the other backends
are bit-equal: integers, floats, Inf, denormals, signs; only which bits of a NaN arise from a sum is left
open.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import native, reference
from sparsync.kernels.reference import Dealt, key_range, magnitude_keys

__all__ = [
    "Dealt",
    "accumulate_",
    "backend_of",
    "count_from",
    "deal",
    "find",
    "key_range",
    "magnitude_keys",
    "merge",
    "restrict",
    "scatter_",
    "subtract_",
    "top",
    "undeal",
]

# elements from which a slow CPU kernel deserves a warning (a pass takes 1 ms)
_LARGE: Final = 1 << 17

P = ParamSpec("P")
R = TypeVar("R")


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


def _dispatched(
    specification: Callable[P, R], *deciding: int, dtype: torch.dtype = torch.float32
) -> Callable[P, R]:
    """Return the function that runs a specification, or the backend of its ``deciding`` arguments."""
    name = specification.__name__

    @functools.wraps(specification)
    def dispatch(*arguments: Any, **named: Any) -> Any:
        backend = backend_of(*[arguments[i] for i in deciding], dtype=dtype)
        if name.endswith("_") and not arguments[0].is_contiguous():  # written in place: not a copy
            return getattr(reference, name)(*arguments, **named)
        flat = [a.contiguous() if isinstance(a, Tensor) else a for a in arguments]
        return getattr(backend, name)(*flat, **named)

    return dispatch


find = _dispatched(reference.find, 0)
top = _dispatched(reference.top, 0)
restrict = _dispatched(reference.restrict, 0, 1, dtype=torch.int64)
subtract_ = _dispatched(reference.subtract_, 0, 2)
scatter_ = _dispatched(reference.scatter_, 0, 2)
count_from = _dispatched(reference.count_from, 0)
deal = _dispatched(reference.deal, 0, dtype=torch.int64)
undeal = _dispatched(reference.undeal, 0, dtype=torch.int64)


@functools.wraps(reference.accumulate_)
def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> tuple[Tensor, Tensor] | None:
    kinds = [(t.dim(), t.numel(), t.dtype, t.device) for t in (residual, gradient)]
    contiguous = residual.is_contiguous() and gradient.is_contiguous()
    if kinds[0] != kinds[1] or residual.dim() != 1 or not contiguous:
        ours, theirs = (f"{[*t.shape]} x {t.dtype} on {t.device}" for t in (residual, gradient))
        raise ConfigurationError(
            f"accumulate_: residual is {ours}, gradient {theirs}; they swap their contents and must "
            "be alike, 1-D and contiguous: convert the gradient first, or pass a flat buffer"
        )
    found: tuple[Tensor, Tensor] | None
    found = backend_of(residual).accumulate_(residual, gradient, key, limit)
    return found


@functools.wraps(reference.merge)
def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if not streams:
        raise ConfigurationError(
            "merge: no streams were given; pass at least one, which may be empty"
        )
    flat = [(indices.contiguous(), values.contiguous()) for indices, values in streams]
    backend = backend_of(*(values for _, values in flat))
    merged: tuple[Tensor, Tensor]
    merged = backend.merge(flat, size, None if within is None else within.contiguous())
    return merged
