"""What users may hand in as a vector: tensors, NumPy arrays, SciPy's sparse vectors, our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.sparse import DenseVector, SparseVector, Vector

__all__ = ["as_vector"]


def as_vector(vector: Any) -> Vector:
    """Return a dense or a sparse vector of the same elements; memory is shared where it can be.

    Args:
        vector: a 1-D tensor or NumPy array; a ``scipy.sparse`` array or matrix with one row, one
            column or one dimension (duplicates are summed); a ``SparseVector`` or ``DenseVector``.

    Raises:
        ConfigurationError: anything else, or another shape.

    Example:
        >>> import numpy as np
        >>> as_vector(np.array([1.0, 0.0], dtype=np.float32)).values
        tensor([1., 0.])
    """
    if isinstance(vector, SparseVector):
        return vector.check()
    if isinstance(vector, DenseVector):
        return DenseVector(_flat(vector.values))
    if isinstance(vector, Tensor):
        return DenseVector(_flat(vector.detach()))  # a sum over ranks is not differentiated
    if hasattr(vector, "tocoo") and hasattr(vector, "shape"):
        return _from_scipy(vector)
    if hasattr(vector, "__array_interface__"):
        try:
            return DenseVector(_flat(torch.as_tensor(vector)))
        except TypeError as error:
            raise ConfigurationError(
                f"an array of {vector.dtype} came; convert it to a numeric dtype"
            ) from error
    raise ConfigurationError(
        f"got {type(vector).__name__}; give a 1-D tensor or NumPy array, a scipy.sparse vector, a "
        "SparseVector or a DenseVector"
    )


def _flat(values: Tensor) -> Tensor:
    if values.dim() != 1:
        raise ConfigurationError(f"the tensor has shape {tuple(values.shape)}; flatten it first")
    return values


def _from_scipy(vector: Any) -> SparseVector:
    shape = tuple(vector.shape)
    if len(shape) > 2 or (len(shape) == 2 and 1 not in shape):
        raise ConfigurationError(
            f"the sparse matrix has shape {shape}; give one row, one column, or its flattened form"
        )
    coo = vector.tocoo()
    along = coo.coords[0] if len(shape) == 1 else (coo.col if shape[0] == 1 else coo.row)
    size = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    indices, values = torch.as_tensor(along).to(torch.int64), torch.as_tensor(coo.data)
    unique, at = torch.unique(indices, return_inverse=True)
    summed = torch.zeros(unique.numel(), dtype=values.dtype).index_add_(0, at, values)
    stored = summed != 0
    return SparseVector(unique[stored], summed[stored], size)
