"""Linear models on naturally sparse data, after SparCML's MPI-OPT (sections 7 and 8.2).

::

    load_shard --> Shard --> Problem --> Sgd | Scd --> weights --> LinearModel --> predictions
                                            |
                     a sparse gradient, or sparse updates, through a lossless collective

Needs SciPy and scikit-learn: ``pip install 'sparsync[linear]'``.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from sparsync.errors import ConfigurationError

if None in (importlib.util.find_spec("scipy"), importlib.util.find_spec("sklearn")):
    raise ConfigurationError(
        "linear models on sparse data need scipy and scikit-learn: pip install 'sparsync[linear]'"
    )

from sparsync.published.sparcml.linear.data import Shard, load_rows, load_shard
from sparsync.published.sparcml.linear.model_file import LinearModel
from sparsync.published.sparcml.linear.problem import Problem
from sparsync.published.sparcml.linear.solvers import Evaluation, Scd, Sgd
from sparsync.published.sparcml.linear.trigrams import trigram_shard

if TYPE_CHECKING:
    from sparsync.published.sparcml.linear.estimator import SparseLinearClassifier

__all__ = [
    "Evaluation",
    "LinearModel",
    "Problem",
    "Scd",
    "Sgd",
    "Shard",
    "SparseLinearClassifier",
    "load_rows",
    "load_shard",
    "trigram_shard",
]


def __getattr__(name: str) -> Any:
    """Import the estimator on first use, because scikit-learn takes a second to import."""
    if name != "SparseLinearClassifier":
        raise AttributeError(
            f"module 'sparsync.published.sparcml.linear' has no attribute {name!r}"
        )
    from sparsync.published.sparcml.linear.estimator import SparseLinearClassifier

    return SparseLinearClassifier
