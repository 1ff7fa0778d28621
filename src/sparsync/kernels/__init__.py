"""The door to the hot loops.  Callers import from here and never from a backend.

Every call goes by its tensors: float32 on the CPU to C++ (``kernels/native.py``) if that was built,
float32 on a GPU to Triton (``kernels/triton``) if that is installed, everything else to the PyTorch
specification (``kernels/torch.py``), to which the others are bit-equal: integers, floats, Inf,
denormals, signs; only which bits of a NaN arise from a sum is left open.
"""

import functools
import importlib
import logging
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, float32

from sparsync.errors import ConfigurationError
from sparsync.kernels import native
from sparsync.kernels import torch as specification
from sparsync.kernels.dealing import Dealt, deal, undeal
from sparsync.kernels.torch import Found, key_range, magnitude_keys

__all__ = [
    "Dealt",
    "Found",
    "accumulate_",
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

# elements from which it is worth a word that a CPU kernel is slow (a pass takes 1 ms)
_LARGE: Final = 1 << 17


def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> Found | None:
    """``residual, gradient = residual + gradient, residual``, in place; find what reaches ``key``.

    The swap leaves an exact undo in the gradient's memory, without a second buffer.

    Args:
        residual: `[n]`, contiguous; modified.
        gradient: `[n]`, same dtype and device, contiguous; modified.
        key: also return the entries of the new residual whose ``magnitude_keys`` are at least
            ``max(key, 1)``; collected in the same pass.
        limit: how many of them at most.

    Returns:
        The entries; None without a key, or if there are more than ``limit``.

    Raises:
        ConfigurationError: the two are not alike, not 1-D or not contiguous.

    Example:
        >>> import torch
        >>> residual, gradient = torch.tensor([1.0, -4.0]), torch.tensor([0.5, 1.0])
        >>> found = accumulate_(residual, gradient, key=int(magnitude_keys(torch.tensor(2.0))), limit=2)
        >>> residual.tolist(), gradient.tolist(), found.indices.tolist(), found.values.tolist()
        ([1.5, -3.0], [1.0, -4.0], [1], [-3.0])
    """
    specification.check_pair(residual, gradient)
    found: Found | None = _backend(residual).accumulate_(residual, gradient, key, limit)
    return found


def find(x: Tensor, key: int, limit: int | None) -> Found | None:
    """Return all entries of magnitude key at least ``max(key, 1)``; None if more than ``limit``.

    Args:
        x: `[n]`.
        key: an integer of ``magnitude_keys``.
        limit: how many at most; None: any number.

    Example:
        >>> import torch
        >>> find(torch.tensor([0.0, 3.0, -0.0]), 0, None).indices.tolist()
        [1]
    """
    found: Found | None = _backend(x).find(x.contiguous(), key, limit)
    return found


def top(x: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the ``min(k, nnz)`` non-zero elements of largest magnitude.

    Ties go to the lower position.

    Example:
        >>> import torch
        >>> top(torch.tensor([1.0, -3.0, 0.0, 1.0]), 2).tolist()
        [0, 1]
    """
    positions: Tensor = _backend(x).top(x.contiguous(), k)
    return positions


def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum ascending ``(indices, values)`` streams as a left fold in the order given; drop zero sums.

    Args:
        streams: at least one; within each, indices are ascending and unique.
        size: all indices are in ``[0, size)``.
        within: ascending indices; entries elsewhere are left out.

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
        raise ConfigurationError("merge: no streams came; give at least one, which may be empty")
    parts = [(indices.contiguous(), values.contiguous()) for indices, values in streams]
    backend = _backend(*(values for _, values in parts))
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
    backend = _backend(indices, among, dtype=indices.dtype)
    positions: Tensor = backend.restrict(indices.contiguous(), among.contiguous())
    return positions


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense[indices] -= values``, in place; indices are unique.  Returns ``dense``."""
    backend = _backend(dense, values) if dense.is_contiguous() else specification
    backend.subtract_(dense, indices.contiguous(), values.contiguous())
    return dense


def scatter_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense = 0; dense[indices] = values``, in place; indices ascend.  Returns ``dense``."""
    backend = _backend(dense, values) if dense.is_contiguous() else specification
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
    counts: Tensor = _backend(values).count_from(values.contiguous(), keys.contiguous())
    return counts


# ---- which backend --------------------------------------------------------------------------------


def _backend(*tensors: Tensor, dtype: object = float32) -> Any:
    """Return the module whose functions take these tensors."""
    devices = {tensor.device.type for tensor in tensors}
    if any(tensor.dtype is not dtype for tensor in tensors) or len(devices) > 1:
        return specification
    if devices == {"cpu"}:
        if native.chosen() != "torch":
            return native
        if native.EXTENSION is None and tensors[0].numel() >= _LARGE:
            _say_that_it_is_slow()
    elif devices == {"cuda"}:
        return _triton() or specification
    return specification


@functools.cache
def _triton() -> Any:
    """Return the Triton backend, imported when the first CUDA tensor comes; None without Triton."""
    backend = importlib.import_module("sparsync.kernels.triton")
    return backend if backend.installed() else None


@functools.cache  # once per process
def _say_that_it_is_slow() -> None:
    logging.getLogger("sparsync").warning(
        "sparsync was installed without its native kernels, so selection on the CPU is about ten times "
        "slower: install a C++ compiler (g++ or clang++) and then sparsync again, with pip's -v to see "
        "what the build says"
    )
