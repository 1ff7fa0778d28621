"""The hot loops, dispatched by the dtype and device of their tensors.

Callers import from here and never from a backend.  Float32 on the CPU goes to C++ (``native.py``) if
that was built, on a GPU to Triton (``triton``) if that is installed, and everything else to PyTorch
(``reference.py``).  PyTorch is the specification, to which the other backends are bit-equal: integers,
floats, Inf, denormals, signs; only which bits of a NaN arise from a sum is left open.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import native, reference
from sparsync.kernels.reference import key_range, magnitude_keys

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


def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> tuple[Tensor, Tensor] | None:
    """``residual, gradient = residual + gradient, residual``, in place; find what reaches ``key``.

    The swap leaves an exact undo in the gradient's memory, without a second buffer.

    Args:
        residual: `[n]`, contiguous; modified.
        gradient: `[n]`, same dtype and device, contiguous; modified.
        key: also return the entries of the new residual whose ``magnitude_keys`` are at least
            ``max(key, 1)``; collected in the same pass.
        limit: how many of them at most.

    Returns:
        Their ascending indices and their values; None without a key, or if there are more than ``limit``.

    Raises:
        ConfigurationError: the two are not alike, not 1-D or not contiguous.

    Example:
        >>> import torch
        >>> residual, gradient = torch.tensor([1.0, -4.0]), torch.tensor([0.5, 1.0])
        >>> accumulate_(residual, gradient, key=int(magnitude_keys(torch.tensor(2.0))), limit=2)
        (tensor([1]), tensor([-3.]))
        >>> residual.tolist(), gradient.tolist()
        ([1.5, -3.0], [1.0, -4.0])
    """
    _check_pair(residual, gradient)
    backend = backend_of(residual)
    found: tuple[Tensor, Tensor] | None = backend.accumulate_(residual, gradient, key, limit)
    return found


def _check_pair(residual: Tensor, gradient: Tensor) -> None:
    for name, tensor in (("residual", residual), ("gradient", gradient)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ConfigurationError(
                f"accumulate_: {name} has shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}; it must be 1-D and contiguous: pass a flat buffer"
            )
    kinds = [(t.numel(), t.dtype, t.device) for t in (residual, gradient)]
    if kinds[0] != kinds[1]:
        ours, theirs = ("{} x {} on {}".format(*kind) for kind in kinds)
        raise ConfigurationError(
            f"accumulate_: residual is {ours}, gradient {theirs}; they swap their contents and must "
            "be alike: convert the gradient first"
        )


def find(x: Tensor, key: int, limit: int | None) -> tuple[Tensor, Tensor] | None:
    """Return indices and values of magnitude key at least ``max(key, 1)``; None if more than ``limit``.

    Args:
        x: `[n]`.
        key: an integer of ``magnitude_keys``.
        limit: how many at most; None: any number.

    Example:
        >>> import torch
        >>> find(torch.tensor([0.0, 3.0, -0.0]), 0, None)
        (tensor([1]), tensor([3.]))
    """
    found: tuple[Tensor, Tensor] | None = backend_of(x).find(x.contiguous(), key, limit)
    return found


def top(x: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the ``min(k, nnz)`` non-zero elements of largest magnitude.

    Ties go to the lower position.

    Example:
        >>> import torch
        >>> top(torch.tensor([1.0, -3.0, 0.0, 1.0]), 2).tolist()
        [0, 1]
    """
    positions: Tensor = backend_of(x).top(x.contiguous(), k)
    return positions


def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum ascending ``(indices, values)`` streams as a left fold in the order given; drop zero sums.

    Args:
        streams: at least one; within each, indices are ascending and unique.
        size: all indices are in ``[0, size)``.
        within: ascending indices; entries elsewhere are left out.

    Raises:
        ConfigurationError: no streams; in C++ also indices of a stream, or ``within``, that do not
            ascend within ``[0, size)``.

    Example:
        >>> import torch
        >>> a = torch.tensor([0, 2]), torch.tensor([1.0, 4.0])
        >>> indices, values = merge([a, (torch.tensor([0]), torch.tensor([-1.0]))], 3)
        >>> indices.tolist(), values.tolist()
        ([2], [4.0])
        >>> merge([a], 3, within=torch.tensor([0, 1]))
        (tensor([0]), tensor([1.]))
    """
    if not streams:
        raise ConfigurationError(
            "merge: no streams were given; pass at least one, which may be empty"
        )
    parts = [(indices.contiguous(), values.contiguous()) for indices, values in streams]
    backend = backend_of(*(values for _, values in parts))
    within = within if within is None else within.contiguous()
    merged: tuple[Tensor, Tensor] = backend.merge(parts, size, within)
    return merged


def restrict(indices: Tensor, among: Tensor) -> Tensor:
    """Return the positions within ``indices`` of those that occur in ``among``; both ascend.

    Example:
        >>> import torch
        >>> restrict(torch.tensor([1, 4, 9]), torch.tensor([0, 4, 9, 12])).tolist()
        [1, 2]
    """
    backend = backend_of(indices, among, dtype=torch.int64)
    positions: Tensor = backend.restrict(indices.contiguous(), among.contiguous())
    return positions


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense[indices] -= values``, in place; indices are unique.  Returns ``dense``.

    Raises:
        ConfigurationError: in C++, an index lies outside; nothing was subtracted.
    """
    backend = backend_of(dense, values) if dense.is_contiguous() else reference
    backend.subtract_(dense, indices.contiguous(), values.contiguous())
    return dense


def scatter_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense = 0; dense[indices] = values``, in place; indices ascend.  Returns ``dense``.

    Raises:
        ConfigurationError: in C++, indices do not ascend within ``dense``; nothing was written.
    """
    backend = backend_of(dense, values) if dense.is_contiguous() else reference
    backend.scatter_(dense, indices.contiguous(), values.contiguous())
    return dense


def count_from(values: Tensor, keys: Tensor) -> Tensor:
    """Return, for each ascending magnitude key, how many values reach it; `[len(keys)]`, int64.

    Example:
        >>> import torch
        >>> keys = magnitude_keys(torch.tensor([0.0, 1.0, 4.0]))
        >>> count_from(torch.tensor([2.0, 0.0, -4.0, 0.5]), keys).tolist()
        [4, 2, 1]
    """
    counts: Tensor = backend_of(values).count_from(values.contiguous(), keys.contiguous())
    return counts


class Dealt(NamedTuple):
    """Elements grouped by owner, ascending within each.

    Attributes:
        order: `[nnz]` their positions among the dealt elements.
        local: `[nnz]` their indices within their owners.
        counts: number of elements of each owner.
    """

    order: Tensor
    local: Tensor
    counts: list[int]


def deal(indices: Tensor, world_size: int) -> Dealt:
    """Deal ascending indices to owners like cards: every P consecutive ones have P owners.

    Element i lies in group g = i // P and belongs to owner ``(i + h(g)) mod P``, where h is a hash: who
    gets which card changes from group to group, so that no stride of the support (a column of a
    matrix) meets one owner only.  Within its owner the element has the index g: order is kept.

    Example:
        >>> deal(torch.arange(6), 3).counts
        [2, 2, 2]
    """
    backend = backend_of(indices, dtype=torch.int64)
    return Dealt(*backend.deal(indices.contiguous(), world_size))


def undeal(local: Tensor, owner: int, world_size: int) -> Tensor:
    """Return the indices of an owner's elements: the inverse of ``deal``.

    Example:
        >>> dealt = deal(torch.arange(6), 3)
        >>> mine = dealt.local.split(dealt.counts)[1]
        >>> torch.equal(undeal(mine, 1, 3), dealt.order.split(dealt.counts)[1])
        True
    """
    backend = backend_of(local, dtype=torch.int64)
    indices: Tensor = backend.undeal(local.contiguous(), owner, world_size)
    return indices
