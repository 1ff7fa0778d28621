"""The hot loops, dispatched by the dtype and device of their tensors.

Callers import from this package, never from a backend.  For float32 on the CPU, C++ (``native.py``) is
used if it was built; for float32 on a GPU, Triton (``triton.py``) if it is installed.  Everything else
uses PyTorch (``reference.py``), which documents and specifies the functions.  The other backends are
bit-equal to it in integers, floats, Inf, denormals and signs.  Only the bits of a NaN that results from
a sum are unspecified.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsync.errors import first_line
from sparsync.kernels import native, reference
from sparsync.kernels.keys import key_range, magnitude_keys
from sparsync.kernels.reference import Dealt, divide_

__all__ = [
    "Dealt",
    "accumulate_",
    "backend_of",
    "count_from",
    "deal",
    "divide_",
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

# number of elements above which a slow CPU kernel warrants a warning (a pass takes 1 ms)
_LARGE: Final = 1 << 17

P = ParamSpec("P")
R = TypeVar("R")


def backend_of(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> Any:
    """Return the module that handles these tensors: ``native``, ``triton`` or ``reference``.

    Args:
        tensors: the tensors that determine the backend; if there are none, it is ``reference``.
        dtype: the only dtype that compiled kernels accept for these tensors.
    """
    on_cpu, on_cuda = bool(tensors), bool(tensors)
    # this runs dozens of times per step, so it only reads properties and builds no sets
    for tensor in tensors:
        if tensor.dtype is not dtype:
            return reference
        on_cpu, on_cuda = on_cpu and tensor.is_cpu, on_cuda and tensor.is_cuda
    if on_cpu:
        if native.chosen() != "torch":
            return native
        if native.EXTENSION is None and tensors[0].numel() >= _LARGE:
            _warn_that_kernels_are_slow()
    elif on_cuda:
        return _triton(tensors[0].device) or reference
    return reference


@functools.cache
def _triton(device: torch.device) -> Any:
    """Import the Triton backend and return it; return None if it cannot be used on this device."""
    # imported lazily, because processes without a GPU do not need it
    backend = importlib.import_module("sparsync.kernels.triton")
    if not backend.installed():
        return None
    first, second = torch.zeros(2, 1, device=device)
    try:
        # the first launch makes Triton compile C code, which fails without a compiler or Python's headers
        backend.accumulate_(first, second)
    except Exception as error:
        _warn_that_triton_fails(str(device), first_line(error))
        return None
    return backend


@functools.cache  # once per process and device
def _warn_that_triton_fails(device: str, reason: str) -> None:
    logging.getLogger("sparsync").warning(
        "Triton cannot launch kernels on %s (%s), so PyTorch's are used, with the same results but more "
        "passes over memory: install a C compiler and Python's headers (gcc, python3-dev)",
        device,
        reason,
    )


@functools.cache  # once per process
def _warn_that_kernels_are_slow() -> None:
    logging.getLogger("sparsync").warning(
        "sparsync was installed without its native kernels, so selection on the CPU is about ten times "
        "slower: install a C++ compiler (g++ or clang++) and then sparsync again, with pip's -v to see "
        "what the build says"
    )


def _dispatched(
    specification: Callable[P, R],
    deciding: Callable[..., Sequence[Tensor]] = lambda *arguments: arguments[:1],
    dtype: torch.dtype = torch.float32,
) -> Callable[P, R]:
    """Return a function that calls the backend for the tensors that ``deciding`` returns."""
    name, in_place = specification.__name__, specification.__name__.endswith("_")

    signature = inspect.signature(specification)

    @functools.wraps(specification)
    def dispatch(*arguments: Any, **named: Any) -> Any:
        if named:
            bound = signature.bind(*arguments, **named)
            arguments, named = bound.args, bound.kwargs
        tensors = deciding(*arguments)
        backend = backend_of(*tensors, dtype=dtype)
        if in_place and not all(tensor.is_contiguous() for tensor in tensors):
            # a kernel would change the contiguous copy made below instead of the caller's tensor
            return getattr(reference, name)(*arguments, **named)
        return getattr(backend, name)(*map(_contiguous, arguments), **named)

    return dispatch


def _contiguous(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.contiguous()
    if isinstance(argument, list | tuple):  # streams
        return [(indices.contiguous(), values.contiguous()) for indices, values in argument]
    return argument


accumulate_ = _dispatched(reference.accumulate_, lambda r, g, *_: (r, g))
find = _dispatched(reference.find)
top = _dispatched(reference.top)
count_from = _dispatched(reference.count_from)
merge = _dispatched(reference.merge, lambda streams, *_: [values for _, values in streams])
restrict = _dispatched(reference.restrict, lambda *both: both, torch.int64)
subtract_ = _dispatched(reference.subtract_, lambda dense, _, values: (dense, values))
scatter_ = _dispatched(reference.scatter_, lambda dense, _, values: (dense, values))
deal = _dispatched(reference.deal, dtype=torch.int64)
undeal = _dispatched(reference.undeal, dtype=torch.int64)
