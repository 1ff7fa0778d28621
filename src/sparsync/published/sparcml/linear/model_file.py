"""A trained model in a file: its weights, and the labels and columns to which they belong."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import ConfigurationError, require
from sparsync.published.sparcml.linear.problem import Floats, Weights

__all__ = ["LinearModel"]

_FORMAT = 1
_NUMBERS = ("format", "size", "intercept", "base")
_ARRAYS = ("indices", "values", "positive", "labels")
_CURE = "give a file that sparsync linear --save wrote"


@final
@dataclass(frozen=True, eq=False)
class LinearModel:
    """Weights and the meaning of their columns and signs, for saving and prediction.

    Example:
        >>> model = LinearModel(np.array([1.0, -2.0]), 0.5, labels=(3.0, 7.0), positive=(7.0,))
        >>> model.predict(csr_matrix([[0.0, 1.0], [1.0, 0.0]])).tolist()
        [3.0, 7.0]
    """

    weights: Floats  # `[dimensions]`
    intercept: float
    labels: tuple[float, ...] = (-1.0, 1.0)  # labels in the training file, ascending
    positive: tuple[float, ...] = (1.0,)  # the labels that were trained as +1
    base: int = 0  # number of the first column in the file

    @staticmethod
    def of(weights: Weights, **meaning: Any) -> LinearModel:
        """Wrap a solver's weights; ``meaning`` gives the other fields, taken from a ``Shard``."""
        return LinearModel(weights.to_dense(), weights.intercept, **meaning)

    @property
    def classes(self) -> tuple[float, float]:
        """The labels for negative and positive scores; -1 and +1 if a class has several labels."""
        if len(self.labels) == 2 and len(self.positive) == 1:
            (negative,) = set(self.labels) - set(self.positive)
            return negative, self.positive[0]
        return -1.0, 1.0

    def scores(self, rows: csr_matrix) -> Floats:
        """Return ``rows w + intercept``, `[rows]`; columns that the model does not have are ignored."""
        fitting = csr_matrix(rows)
        if fitting.shape[1] != len(self.weights):
            fitting = fitting.copy()
            fitting.resize((fitting.shape[0], len(self.weights)))
        scores: Floats = fitting @ self.weights + self.intercept
        return scores

    def predict(self, rows: csr_matrix) -> NDArray[np.float64]:
        """Return a label per row, `[rows]`; a score of 0 counts as positive."""
        negative, positive = self.classes
        return np.where(self.scores(rows) >= 0, positive, negative)

    def accuracy(self, rows: csr_matrix, labels: Floats) -> float | None:
        """Return the fraction of rows with the right sign; None if a label belongs to no class."""
        if not len(labels) or not np.isin(labels, self.labels).all():
            return None
        right = (self.scores(rows) >= 0) == np.isin(labels, self.positive)
        return float(right.mean())

    def save(self, path: Path) -> None:
        """Write a NumPy archive with the nonzero weights.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        indices = np.flatnonzero(self.weights)
        arrays: dict[str, Any] = {
            "format": np.int64(_FORMAT),
            "size": np.int64(len(self.weights)),
            "intercept": np.float64(self.intercept),
            "base": np.int64(self.base),
            "indices": indices.astype(np.int64),
            "values": self.weights[indices],
            "positive": np.array(self.positive, np.float64),
            "labels": np.array(self.labels, np.float64),
        }
        try:
            with path.open("wb") as file:  # NumPy would append ".npz" to a name
                np.savez_compressed(file, **arrays)
        except OSError as error:
            raise ConfigurationError(
                f"cannot write the model '{path}' ({error.strerror or error}); name another file"
            ) from error

    @staticmethod
    def load(path: Path) -> LinearModel:
        """Read a file that ``save`` has written; nothing in it is unpickled.

        Raises:
            ConfigurationError: the file cannot be read, or is not a saved model.
        """
        require(path.is_file(), f"the model '{path}' is not a file; {_CURE}")
        try:
            with zipfile.ZipFile(path):  # otherwise NumPy might load it as an array or a pickle
                pass
            with np.load(path, allow_pickle=False) as archive:
                found = {name: archive[name] for name in (*_NUMBERS, *_ARRAYS)}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            reason = getattr(error, "strerror", None) or "no model"
            raise ConfigurationError(
                f"cannot read the model '{path}' ({reason}); {_CURE}"
            ) from error
        _check(path, found)
        indices, values = found["indices"], found["values"]
        weights = np.zeros(int(found["size"]), values.dtype)
        weights[indices] = values
        return LinearModel(
            weights,
            float(found["intercept"]),
            tuple(found["labels"].tolist()),
            tuple(found["positive"].tolist()),
            int(found["base"]),
        )


def _check(path: Path, found: dict[str, Any]) -> None:
    """Refuse arrays that are not a valid model."""
    shapes = all(found[name].shape == () for name in _NUMBERS)
    shapes = shapes and all(found[name].ndim == 1 for name in _ARRAYS)
    kinds = shapes and all(found[name].dtype.kind in "iuf" for name in (*_NUMBERS, *_ARRAYS))
    fits = kinds and found["indices"].dtype == np.int64 and 0 <= int(found["size"]) < 1 << 31
    if fits:
        indices, size = found["indices"], int(found["size"])
        fits = indices.shape == found["values"].shape
        fits = fits and bool(((indices >= 0) & (indices < size)).all())
    require(
        bool(fits) and int(found["format"]) == _FORMAT,
        f"'{path}' is not a model of this version; {_CURE}",
    )
