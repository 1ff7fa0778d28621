"""The hot loops in C++ (``native/``), for float32 on the CPU; ``kernels/__init__.py`` describes them.

Built when the package is installed, if there is a C++ compiler.  The instruction set is chosen at run
time: AVX-512, AVX2, NEON, or plain C++.  ``SPARSYNC_KERNELS`` in the environment names another one of
them, or ``torch`` to switch this module off.  In every function ``isa`` is one of
``instruction_sets()``, by default ``chosen()``, and ``threads`` the most that are used, by default
``torch.get_num_threads()``, fewer for small vectors.

Tensors are passed as addresses; whatever could read or write outside them is refused here or in C++.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels.reference import check_pair

__all__ = [
    "EXTENSION",
    "accumulate_",
    "chosen",
    "count_from",
    "deal",
    "empty",
    "find",
    "guarded",
    "instruction_sets",
    "merge",
    "restrict",
    "scatter_",
    "subtract_",
    "top",
    "undeal",
]

_INTERFACE: Final = 2  # of the extension's functions: native/module.cpp states the same number


def _load() -> Any:
    try:
        extension = importlib.import_module("sparsync.kernels._native")
    except ImportError:  # not built, or built for another machine
        return None
    if getattr(extension, "interface", 1) != _INTERFACE:
        raise ConfigurationError(
            f"the native kernels in {extension.__file__} were built from other sources than this "
            "sparsync: install it again (in a checkout: make)"
        )
    return extension


EXTENSION: Final[Any] = _load()  # the extension module; None if there is none

# elements for which a further thread is worth its start (50 us): a pass over them takes 200 us
_ELEMENTS_PER_THREAD: Final = 1 << 20
# up to here ``find`` without a limit allocates for all elements instead of counting first
_SMALL: Final = 1 << 14
# from here on ``top`` guesses a threshold from a sample instead of counting all keys
_SAMPLED: Final = 1 << 17
# one element in this many is sampled, or more, so that there are at least 2^12 samples
_STRIDE: Final = 256
_SAMPLES: Final = 1 << 12


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that this build and this machine have, the fastest first."""
    return tuple(EXTENSION.instruction_sets()) if EXTENSION is not None else ()


@functools.cache
def chosen() -> str:
    """Return the instruction set in use; ``torch`` if this module is not.

    Raises:
        ConfigurationError: ``SPARSYNC_KERNELS`` names what is not there.
    """
    available = (*instruction_sets(), "torch")
    wanted = os.environ.get("SPARSYNC_KERNELS") or available[0]
    if wanted not in available:
        raise ConfigurationError(
            f"SPARSYNC_KERNELS is {wanted!r}; this installation on this machine has "
            f"{', '.join(available)}: name one of them or unset it"
        )
    return wanted


def accumulate_(
    residual: Tensor,
    gradient: Tensor,
    key: int | None = None,
    limit: int = 0,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See ``kernels.accumulate_``.  Cost: one pass that reads and writes both."""
    check_pair(residual, gradient)
    n, isa, workers = residual.numel(), isa or chosen(), _workers(residual.numel(), threads)
    addresses = _address("residual", residual), _address("gradient", gradient)
    if key is None:
        EXTENSION.swap_add(*addresses, n, workers, isa)
        return None
    return _collect(
        lambda low, room, indices, values: EXTENSION.accumulate(
            *addresses, n, low, room, indices, values, workers, isa
        ),
        key,
        min(limit, n),
        workers,
    )


def find(
    x: Tensor,
    key: int,
    limit: int | None,
    *,
    isa: str | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """See ``kernels.find``.  Cost: one reading of x; a second one without a limit."""
    n, isa, workers = x.numel(), isa or chosen(), _workers(x.numel(), threads)
    address = _address("x", x)
    if limit is None:
        limit = n if n <= _SMALL else EXTENSION.count(address, n, _low(key), workers, isa)
    return _collect(
        lambda low, room, indices, values: EXTENSION.find(
            address, n, low, room, indices, values, workers, isa
        ),
        key,
        min(limit, n),
        workers,
    )


def top(x: Tensor, k: int, *, isa: str | None = None, threads: int | None = None) -> Tensor:
    """See ``kernels.top``.

    Cost: for many elements, a reading of x and a selection among somewhat more than k; where the
    sample misled, or k is no small part of n, up to six readings.
    """
    n, isa = x.numel(), isa or chosen()
    address = _address("x", x)
    k = min(k, n)
    if k <= 0:
        return empty(0, torch.int64)
    if n >= _SAMPLED and 4 * k <= n:
        key = EXTENSION.guess(address, n, k, min(_STRIDE, n // _SAMPLES))
        candidates = find(x, key, 4 * k + _SMALL, isa=isa, threads=threads)
        if candidates is not None and candidates[0].numel() >= k:
            return candidates[0][top(candidates[1], k, isa=isa)]
    positions = empty(k, torch.int64)
    return positions[: EXTENSION.top(address, n, k, positions.data_ptr(), isa)]


def merge(
    streams: Sequence[tuple[Tensor, Tensor]],
    size: int,
    within: Tensor | None = None,
    *,
    isa: str | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``kernels.merge``."""
    parts = [(*_entries(indices, values), indices.numel()) for indices, values in streams]
    room = sum(count for _, _, count in parts)
    indices, values = empty(room, torch.int64), empty(room, torch.float32)
    ends = indices.data_ptr(), values.data_ptr(), isa or chosen()
    if within is None:
        count = guarded(EXTENSION.merge, parts, size, *ends)
    else:
        places = _address("within", within, torch.int64), within.numel()
        count = guarded(EXTENSION.merge_within, parts, size, *places, *ends)
    return indices[:count], values[:count]


def restrict(indices: Tensor, among: Tensor) -> Tensor:
    """See ``kernels.restrict``."""
    positions = torch.empty_like(indices)
    searched = _address("indices", indices, torch.int64), indices.numel()
    wanted = _address("among", among, torch.int64), among.numel()
    return positions[: guarded(EXTENSION.restrict_to, *searched, *wanted, positions.data_ptr())]


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """See ``kernels.subtract_``."""
    guarded(EXTENSION.subtract, *_places(dense, indices, values))
    return dense


def scatter_(
    dense: Tensor, indices: Tensor, values: Tensor, *, threads: int | None = None
) -> Tensor:
    """See ``kernels.scatter_``."""
    places = _places(dense, indices, values)
    guarded(EXTENSION.scatter, *places, _workers(dense.numel(), threads))
    return dense


def count_from(values: Tensor, keys: Tensor, *, isa: str | None = None) -> Tensor:
    """See ``kernels.count_from``."""
    keys = keys.to(torch.int64).contiguous()
    counts = torch.empty_like(keys)
    addresses = _address("values", values), _address("keys", keys, torch.int64)
    arguments = (addresses[0], values.numel(), addresses[1], keys.numel(), counts.data_ptr())
    guarded(EXTENSION.count_from, *arguments, isa or chosen())
    return counts


def deal(indices: Tensor, world_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """See ``kernels.deal``."""
    order, local = torch.empty_like(indices), torch.empty_like(indices)
    counts = empty(world_size, torch.int64)
    start = _address("indices", indices, torch.int64)
    ends = order.data_ptr(), local.data_ptr(), counts.data_ptr()
    EXTENSION.deal(start, indices.numel(), world_size, *ends)
    return order, local, counts.tolist()


def undeal(local: Tensor, owner: int, world_size: int) -> Tensor:
    """See ``kernels.undeal``."""
    indices, start = torch.empty_like(local), _address("local", local, torch.int64)
    EXTENSION.undeal(start, local.numel(), owner, world_size, indices.data_ptr())
    return indices


# ---- passing tensors ------------------------------------------------------------------------------


def _address(name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigurationError(
            f"{name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}; the native "
            f"kernels take contiguous {dtype} on the CPU: call sparsync.kernels, which chooses"
        )
    return tensor.data_ptr()


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate on the CPU, whatever the default dtype and device; unwritten memory costs nothing."""
    return torch.empty(count, dtype=dtype, device="cpu")


def _entries(indices: Tensor, values: Tensor) -> tuple[int, int]:
    if indices.dim() != 1 or indices.shape != values.shape:
        raise ConfigurationError(
            f"indices {tuple(indices.shape)} and values {tuple(values.shape)} must be 1-D and "
            "equally long"
        )
    return _address("indices", indices, torch.int64), _address("values", values)


def _places(dense: Tensor, indices: Tensor, values: Tensor) -> tuple[int, int, int, int, int]:
    return _address("dense", dense), dense.numel(), *_entries(indices, values), indices.numel()


def guarded(kernel: Callable[..., Any], *arguments: object) -> Any:
    """Call a kernel that checks its arguments; what it refuses raises ConfigurationError."""
    try:
        return kernel(*arguments)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


def _workers(n: int, threads: int | None) -> int:
    return max(1, min(threads or torch.get_num_threads(), n // _ELEMENTS_PER_THREAD))


def _low(key: int) -> int:
    """Return the key as an unsigned 32-bit number; zeros are never found."""
    return min(max(key, 1), 1 << 31)


def _collect(
    run: Callable[[int, int, int, int], int], key: int, limit: int, workers: int
) -> tuple[Tensor, Tensor] | None:
    """Allocate for every worker, run the pass, and cut to the entries found."""
    limit = max(limit, 0)
    indices, values = (empty(workers * limit, t) for t in (torch.int64, torch.float32))
    count = run(_low(key), limit, indices.data_ptr(), values.data_ptr())
    return None if count < 0 else (indices[:count], values[:count])
