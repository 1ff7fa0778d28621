"""All names that the digests use from the library, in one place."""

# ruff: noqa: F401  (the other modules take these names from here)

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsync import Correction, simulate
from sparsync.api import _prepare
from sparsync.averaging.schemes import SCHEMES
from sparsync.cost.machine import Machine
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import reducer_state, restore_reducer
from sparsync.feedback.schedule import Warmup
from sparsync.presets import PRESETS, resolve
from sparsync.published.baselines import GaussianK
from sparsync.published.oktopk import Reused
from sparsync.published.redsync import BinarySearch, BySize, Layered, OneSigned, SignMean, Trimmed
from sparsync.published.sparcml.linear.problem import Problem
from sparsync.published.sparcml.linear.solvers import Scd, Sgd
from sparsync.selection import Blockwise, Everything, Exact, Sampled
from sparsync.selection.selector import reaching
from sparsync.sparse import DenseVector, SparseVector
from sparsync.units import plan_units
from sparsync.wire import Coo, LloydMax, Packed, Qsgd, SparseQsgd, StreamCodec, Whole

SELECTORS: Mapping[str, Callable[[], Any]] = {
    "everything": Everything,
    "exact": Exact,
    "reused": Reused,
    "reused for 2 steps, no cap": partial(Reused, 2, cap=None),
    "blockwise": Blockwise,
    "blockwise, 2 of 16": partial(Blockwise, 2, 16),
    "trimmed": Trimmed,
    "by size": partial(BySize, 0),
    "by size, searched": partial(BySize, 0, 0, 0),
    "gaussian": GaussianK,
    "binary search": BinarySearch,
    "binary search, reused": partial(BinarySearch, reuse_period=2),
    "sampled": Sampled,
    "sampled, a tenth": partial(Sampled, 0.1, least=1),
    "one-signed": lambda: OneSigned(Exact()),
    "layered": lambda: Layered(Exact).for_layers([1000, 1, 4000, 999]),
    "layered, one-signed": lambda: Layered(lambda: OneSigned(Trimmed())).for_layers([2000, 4000]),
}


async def reduced(vector: Tensor, comm: Any, *, k: int | None, **arguments: Any) -> Any:
    """Run ``allreduce`` on a communicator that cannot block."""
    arguments = dict(arguments)
    algorithm, op = arguments.pop("algorithm", None), arguments.pop("op", "sum")
    return await _prepare(vector, algorithm, k, op, arguments)(comm)


def encoded(
    codec: Any, values: Tensor, *, dense: bool, rank: int, step: int
) -> tuple[Tensor, Tensor]:
    """Return a rank's message, and the vector that other ranks decode from this message."""
    codec = codec.seeded(rank, step)
    given = DenseVector(values) if dense else SparseVector.from_dense(values)
    payload = codec.encode(given).payload
    return payload, codec.decode(payload, values.numel()).to_dense()


def selected(selector: Any, accumulated: Tensor, k: int, step: int, *, watched: bool) -> list[Any]:
    """Return the selection; if ``watched``, from candidates collected during accumulation, if any."""
    collect = selector.collect_from(k, step, accumulated.dtype) if watched else None
    collected = reaching(accumulated, *collect) if collect else None
    vector = selector.select(accumulated, k, step, collected)
    if isinstance(vector, DenseVector):
        return [vector.values.clone()]
    return [vector.indices.to(torch.int64), vector.values.clone()]


def linear_solver(
    solver: str,
    comm: Any,
    features: Any,
    labels: Any,
    exchange: str,
    dtype: type,
    *,
    model: str,
    l1: float = 0.0,
    l2: float = 0.0,
) -> Any:
    """Return a solver for one rank's rows."""
    kind = np.dtype(dtype)
    problem = Problem(features, labels, model, l1, l2, dtype=kind)
    if solver == "scd":
        return Scd(comm, problem, exchange, coordinates=4)
    return Sgd(comm, problem, exchange, lr=0.5, schedule="1/t")
