"""Convert vectors of NumPy, SciPy and PyTorch to vectors of sparsync."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.sparse import DenseVector, SparseVector, Vector

__all__ = ["as_vector"]


def as_vector(vector: Any) -> Vector:
    """Return a dense or a sparse vector with the same elements, sharing memory if possible.

    Args:
        vector: one of these:

            - a 1-D tensor or NumPy array;
            - ``(indices, values, size)`` with NumPy arrays or tensors, whose indices are distinct, of
              any integer type, and in any order;
            - a sparse PyTorch tensor, or a ``scipy.sparse`` array or matrix, with one row, one column or
              one dimension (duplicates are summed);
            - a ``SparseVector`` or a ``DenseVector``.

    Example:
        >>> import numpy as np
        >>> as_vector(np.array([1.0, 0.0], dtype=np.float32)).values
        tensor([1., 0.])
        >>> as_vector((np.array([7, 2], dtype=np.uint16), np.array([1.0, 3.0]), 10)).indices
        tensor([2, 7])
    """
    if isinstance(vector, SparseVector):
        return vector.check()
    if isinstance(vector, DenseVector):
        return DenseVector(_flat(vector.values))
    if isinstance(vector, Tensor):
        plain = vector.detach()  # reductions over ranks are not differentiable
        if plain.layout is torch.strided:
            return DenseVector(_flat(plain))
        return _from_torch(plain)
    if isinstance(vector, tuple):
        return _from_parts(vector)
    if hasattr(vector, "tocoo") and hasattr(vector, "shape"):
        return _from_scipy(vector)
    if hasattr(vector, "__array_interface__"):
        return DenseVector(_flat(_tensor(vector)))
    raise ConfigurationError(
        f"got {type(vector).__name__}; give a 1-D tensor or NumPy array, (indices, values, size), a "
        "sparse tensor, a scipy.sparse vector, a SparseVector or a DenseVector"
    )


def _flat(values: Tensor) -> Tensor:
    if values.dim() != 1:
        raise ConfigurationError(f"the tensor has shape {tuple(values.shape)}; flatten it first")
    return values


def _tensor(array: Any) -> Tensor:
    """Return an array as a tensor, sharing its memory if PyTorch can use it."""
    if isinstance(array, Tensor):
        return array.detach()
    if isinstance(array, np.ma.MaskedArray):
        raise ConfigurationError(
            "the array is masked; give filled(0), or its data without the mask"
        )
    array = np.asarray(array)
    # PyTorch does not support read-only memory, negative strides or foreign byte order
    usable = array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0
    try:
        copied = array if usable else array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.as_tensor(copied, device="cpu")
    except TypeError as error:
        raise ConfigurationError(
            f"the array has dtype {array.dtype}; convert it to a numeric dtype"
        ) from error


def _from_parts(parts: tuple[Any, ...]) -> SparseVector:
    """Convert ``(indices, values, size)``."""
    expected = "give (indices, values, size): two 1-D arrays of equal length and a whole number"
    arrays = all(isinstance(x, Tensor) or hasattr(x, "__array_interface__") for x in parts[:2])
    if len(parts) != 3 or not arrays or not hasattr(parts[2], "__index__"):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ConfigurationError(f"got a tuple of ({kinds}); {expected}")
    indices, values, size = _tensor(parts[0]), _tensor(parts[1]), operator.index(parts[2])
    if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
        raise ConfigurationError(f"the indices are {indices.dtype}; convert them to integers")
    if indices.dim() != 1 or indices.shape != values.shape:
        shapes = f"indices {tuple(indices.shape)} and values {tuple(values.shape)}"
        raise ConfigurationError(f"got {shapes}; {expected}")
    indices = indices.to(torch.int64)
    if bool((indices.diff() <= 0).any()):
        indices, order = torch.sort(indices)
        values = values[order]
    if indices.numel() and (int(indices[0]) < 0 or int(indices[-1]) >= size):
        ends = f"from {int(indices[0])} to {int(indices[-1])}"
        raise ConfigurationError(f"the indices are {ends}; give them within [0, {size})")
    if bool((indices.diff() == 0).any()):
        raise ConfigurationError("an index occurs more than once; combine its values first")
    return SparseVector(indices, values, size).check()


def _from_torch(matrix: Tensor) -> SparseVector:
    along, size = _along(tuple(matrix.shape))
    coo = matrix.to_sparse(layout=torch.sparse_coo).coalesce()
    if coo.dense_dim():
        raise ConfigurationError(
            f"the sparse tensor has {coo.dense_dim()} dense dimensions; give one without"
        )
    return SparseVector(coo.indices()[along], coo.values(), size)


def _from_scipy(matrix: Any) -> SparseVector:
    along, size = _along(tuple(matrix.shape))
    coo = matrix.tocoo(copy=True)  # a copy, because duplicates are summed in place
    coo.sum_duplicates()
    # stored zeros are kept, because not every operation's neutral element is 0
    return _from_parts(
        (coo.coords[0] if coo.ndim == 1 else (coo.row, coo.col)[along], coo.data, size)
    )


def _along(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the dimension along which a matrix of one row or column extends, and its size."""
    if not 1 <= len(shape) <= 2 or (len(shape) == 2 and 1 not in shape):
        raise ConfigurationError(
            f"the sparse matrix has shape {shape}; give one row, one column, or its flattened form"
        )
    along = 1 if len(shape) == 2 and shape[0] == 1 else 0
    return along, shape[along]
