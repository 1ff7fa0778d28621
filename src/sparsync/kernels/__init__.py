"""The hot loops, dispatched to C++, Triton or PyTorch by their tensors (``kernels/dispatch.py``).

Callers import from here and never from a backend.  PyTorch (``kernels/reference.py``) is the
specification, to which the other backends are bit-equal: integers, floats, Inf, denormals, signs; only
which bits of a NaN arise from a sum is left open.
"""

from collections.abc import Sequence

from torch import Tensor, int64

from sparsync.errors import ConfigurationError
from sparsync.kernels import reference
from sparsync.kernels.dealing import Dealt, deal, undeal
from sparsync.kernels.dispatch import backend_of
from sparsync.kernels.reference import key_range, magnitude_keys

__all__ = [
    "Dealt",
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
    reference.check_pair(residual, gradient)
    found: tuple[Tensor, Tensor] | None = backend_of(residual).accumulate_(
        residual, gradient, key, limit
    )
    return found


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
    backend = backend_of(indices, among, dtype=int64)
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
