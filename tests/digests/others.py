"""Digest all results except averaged gradients: calls, models, linear models, bytes, selections."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse import random

from . import subject
from .canonical import sha
from .gradients import Digests, Row, digests_of

__all__ = ["rows"]

_RANKS = (2, 3, 4)


# ---- one reduction ---------------------------------------------------------------------------------

# name -> (dtype, k, arguments of the call)
_CALLS: dict[str, tuple[torch.dtype, int | None, dict[str, Any]]] = {
    "budgeted, 50 entries": (torch.float32, 50, {}),
    "nothing lost": (torch.float32, None, {}),
    "max": (torch.float32, None, {"op": "max"}),
    "min, float64": (torch.float64, None, {"op": "min"}),
    "product, float64": (torch.float64, None, {"op": "prod", "algorithm": "recursive-doubling"}),
    "float64": (torch.float64, None, {"algorithm": "split-allgather"}),
    "float64, ring": (torch.float64, None, {"algorithm": "ring"}),
    "int64": (torch.int64, None, {}),
    "int32, or": (torch.int32, None, {"op": "or", "algorithm": "dynamic"}),
    "bfloat16, oktopk": (torch.bfloat16, 50, {"algorithm": "oktopk"}),
    "float16, allgather": (torch.float16, 50, {"algorithm": "allgather"}),
    "dense": (torch.float32, None, {"algorithm": "dense"}),
}


def _called(name: str, ranks: int) -> Digests:
    dtype, k, arguments = _CALLS[name]

    async def program(comm: Any) -> dict[str, Any]:
        vector = _sparse_noise(comm.rank, 3000).mul_(8).to(dtype)
        reduced = await subject.reduced(vector, comm, k=k, **arguments)
        return {
            "totals": reduced.total.to_dense(),
            "delivered": reduced.delivered.to_dense(),
            "lost": None if reduced.lost is None else reduced.lost.to_dense(),
            "messages": comm.ledger.total().as_dict(),
        }

    return digests_of(program, ranks)


def _sparse_noise(seed: int, size: int) -> torch.Tensor:
    """Return noise in which a tenth of the elements are nonzero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator)
    return values * (torch.rand(size, generator=generator) < 0.1)


# ---- averages of models ----------------------------------------------------------------------------

_STEPS = 10
_PERIODS = {
    name: {"period": 3} for name in ("local", "bmuf", "diloco", "qsparse-local", "sparseloco")
}
_SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, _PERIODS.get(name, {})) for name in subject.SCHEMES},
    "dpsgd, twice": ("dpsgd", {"mixing_steps": 2}),
    "sgp, 2 neighbours": ("sgp", {"neighbours": 2}),
    "wagma, period of 3": ("wagma", {"sync_period": 3}),
    "wagma, int8": ("wagma", {"values": "int8"}),
    "wagma, synchronous, bf16": ("wagma", {"grouping": "synchronous", "values": "bf16"}),
    "wagma, fixed groups": ("wagma", {"dynamic": False}),
    "bmuf, Nesterov": ("bmuf", {"period": 3, "nesterov": True}),
    "qsparse-local, budgeted": (
        "qsparse-local",
        {"algorithm": "budgeted", "density": 0.05, "period": 2},
    ),
}


def _averaged(name: str, ranks: int, late: bool) -> Digests:
    """Average models on ranks that are in step, or are late in turn by the simulator's clock."""
    scheme, options = _SCHEMES[name]

    async def program(comm: Any) -> dict[str, Any]:
        averager = subject.SCHEMES[scheme](**options)
        vector = torch.linspace(-1, 1, 5000)
        await averager.begin(comm, vector, 0)
        models = []
        for step in range(_STEPS):
            generator = torch.Generator().manual_seed(100 * comm.rank + step)
            vector = vector + torch.randn(5000, generator=generator) / 10
            await comm.compute(1e-3 * ((7 * step + 3 * comm.rank) % 5 if late else 1))
            vector = await averager.average(comm, vector, step)
            models.append(vector.clone())
        state = averager.state_dict()["content"]
        for name in ("scheme", *averager._options()):
            del state[name]  # names and numbers that were given
        end = await averager.conclude(comm, vector, _STEPS)
        messages = comm.ledger.total().as_dict()
        return {"models": models, "state": state, "end": end, "messages": messages}

    return digests_of(program, ranks, timed=True)


# ---- linear models ---------------------------------------------------------------------------------


_SPARSE, _SCD = {"model": "logistic", "l1": 0.01, "l2": 0.05}, {"model": "logistic", "l2": 0.05}
_LINEAR: dict[str, tuple[str, str, type, dict[str, Any]]] = {
    "sgd, split-allgather, float64": ("sgd", "split-allgather", np.float64, _SPARSE),
    "sgd, split-allgather, float32": ("sgd", "split-allgather", np.float32, _SPARSE),
    "sgd, dense, float64": ("sgd", "dense", np.float64, _SPARSE),
    "sgd, dense, float32": ("sgd", "dense", np.float32, _SPARSE),
    "sgd, svm": ("sgd", "ring", np.float64, {"model": "svm"}),
    "scd, allgather": ("scd", "allgather", np.float64, _SCD),
    "scd, dense": ("scd", "dense", np.float64, _SCD),
}


def _fitted(name: str, ranks: int) -> Digests:
    solver, exchange, dtype, options = _LINEAR[name]

    async def program(comm: Any) -> dict[str, Any]:
        generator = np.random.default_rng(3)
        features = random(60, 40, 0.15, format="csr", random_state=generator)
        labels = np.where(features @ generator.standard_normal(40) >= 0.1, 1.0, -1.0)
        mine = slice(60 * comm.rank // ranks, 60 * (comm.rank + 1) // ranks)
        made = subject.linear_solver(
            solver, comm, features[mine], labels[mine], exchange, dtype, **options
        )
        await made.start()
        losses = []
        for epoch in range(3):
            await made.epoch(epoch, lambda steps: None)
            losses.append(float((await made.evaluate()).objective))
        weights = [torch.from_numpy(made.weights.to_dense()), float(made.weights.intercept)]
        return {"losses": losses, "weights": weights, "messages": comm.ledger.total().as_dict()}

    return digests_of(program, ranks)


# ---- bytes and selections --------------------------------------------------------------------------

_CODECS: dict[str, Any] = {
    "coo": subject.Coo(),
    "packed": subject.Packed(),
    "packed, int8": subject.Packed("int8"),
    "packed, int8, blocks of 7": subject.Packed("int8", block=7),
    "packed, fp32": subject.Packed("fp32"),
    "qsgd, entries, 4 bits": subject.SparseQsgd(4),
    "qsgd, entries, 8 bits": subject.SparseQsgd(8),
    "qsgd, entries, 4 bits, max": subject.SparseQsgd(4, scale="max"),
    "qsgd, entries, 2 bits, shrunk": subject.SparseQsgd(2, shrink=True),
    "sign-mean": subject.SignMean(),
    "sign-mean, packed": subject.SignMean("packed"),
    "stream": subject.StreamCodec(),
    "stream, bf16": subject.StreamCodec(subject.Packed()),
}
_DENSE_CODECS: dict[str, Any] = {
    "whole": subject.Whole(),
    "qsgd, 4 bits": subject.Qsgd(4),
    "qsgd, 8 bits, max": subject.Qsgd(8, scale="max"),
    **{f"lloyd-max, {bits} bits": subject.LloydMax(bits) for bits in (1, 2, 3, 4, 8)},
    "lloyd-max, blocks of 7": subject.LloydMax(2, block=7),
}


def _written(codec: Any, dense: bool) -> Digests:
    pairs = [
        subject.encoded(codec, _sparse_noise(17, 5000).to(dtype), dense=dense, rank=1, step=step)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for step in range(2)
    ]
    payloads, decoded = zip(*pairs, strict=True)
    return {"payload": sha(payloads), "decoded": sha(decoded)}


def _selected(name: str) -> Digests:
    taken, states = [], []
    for watched in (False, True):
        selector = subject.SELECTORS[name]()
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            accumulated = torch.randn(6000, generator=generator) * (1 + step)
            taken.append(subject.selected(selector, accumulated, 90, step, watched=watched))
            states.append(selector.state_dict())
    return {"selected": sha(taken), "state": sha(states)}


def rows() -> dict[str, Row]:
    """Return the results to record, by name."""
    table: dict[str, Row] = {}
    for name in _CALLS:
        for ranks in _RANKS:
            table[f"calls: {name}: {ranks} ranks"] = partial(_called, name, ranks)
    for name in _SCHEMES:
        for ranks in (1, *_RANKS):
            table[f"models: {name}: {ranks} ranks"] = partial(_averaged, name, ranks, False)
        table[f"models: {name}: 4 ranks, late by turns"] = partial(_averaged, name, 4, True)
    for name in _LINEAR:
        for ranks in (1, 3):
            table[f"linear: {name}: {ranks} ranks"] = partial(_fitted, name, ranks)
    for name, codec in _CODECS.items():
        table[f"bytes: {name}"] = partial(_written, codec, False)
    for name, codec in _DENSE_CODECS.items():
        table[f"bytes: {name}, every element"] = partial(_written, codec, True)
    for name in subject.SELECTORS:
        table[f"selected: {name}"] = partial(_selected, name)
    return table
