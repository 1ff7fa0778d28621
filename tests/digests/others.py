"""What one process computes besides averages of gradients: calls, models, selections, bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse import random

from . import subject
from .canonical import sha

__all__ = ["rows"]

Digests = dict[str, str]
Row = Callable[[], Digests]

_RANKS = (2, 3, 4)


def rows() -> dict[str, Row]:
    """Return what is to be recorded, by name."""
    return {**_calls(), **_averages(), **_linear(), **_codecs(), **_selectors()}


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


def _calls() -> dict[str, Row]:
    def make(dtype: torch.dtype, k: int | None, arguments: dict[str, Any], ranks: int) -> Digests:
        async def program(comm: Any) -> list[Any]:
            vector = _sparse_noise(comm.rank, 3000).mul_(8).to(dtype)
            reduced = await subject.reduced(vector, comm, k=k, **arguments)
            lost = reduced.lost.to_dense() if reduced.lost is not None else None
            total = comm.ledger.total().as_dict()
            return [reduced.total.to_dense(), reduced.delivered.to_dense(), lost, total]

        totals, delivered, lost, messages = zip(
            *subject.simulate(program, ranks).results, strict=True
        )
        return {
            "totals": sha(totals),
            "delivered": sha(delivered),
            "lost": sha(lost),
            "messages": sha(messages),
        }

    return {
        f"calls: {name}: {ranks} ranks": partial(make, *case, ranks)
        for name, case in _CALLS.items()
        for ranks in _RANKS
    }


def _sparse_noise(seed: int, size: int) -> torch.Tensor:
    """Return noise of which a tenth is not zero."""
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


def _averages() -> dict[str, Row]:
    """Ranks in step, and ranks that are late by turns: the simulator's clock decides, so it repeats."""

    def make(scheme: str, options: dict[str, Any], ranks: int, late: bool) -> Digests:
        async def program(comm: Any) -> list[Any]:
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
            state = averager.state_dict()
            del state["scheme"]  # a name
            end = await averager.conclude(comm, vector, _STEPS)
            return [models, state, end, comm.ledger.total().as_dict()]

        simulation = subject.simulate(program, ranks)
        models, states, ends, messages = zip(*simulation.results, strict=True)
        return {
            "models": sha(models),
            "state": sha(states),
            "end": sha(ends),
            "messages": sha(messages),
            "seconds": sha(simulation.seconds),
        }

    return {
        f"models: {name}: {ranks} ranks{', late by turns' if late else ''}": partial(
            make, *case, ranks, late
        )
        for name, case in _SCHEMES.items()
        for ranks in (1, *_RANKS)
        for late in ((False, True) if ranks == 4 else (False,))
    }


# ---- linear models ---------------------------------------------------------------------------------


def _linear() -> dict[str, Row]:
    def make(solver: str, exchange: str, dtype: type, ranks: int, **options: Any) -> Digests:
        async def program(comm: Any) -> list[Any]:
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
            weights = torch.from_numpy(made.weights.to_dense())
            messages = comm.ledger.total().as_dict()
            return [losses, [weights, float(made.weights.intercept)], messages]

        losses, weights, messages = zip(*subject.simulate(program, ranks).results, strict=True)
        return {"losses": sha(losses), "weights": sha(weights), "messages": sha(messages)}

    cases: dict[str, Row] = {}
    for ranks in (1, 3):
        for exchange in ("split-allgather", "dense"):
            for dtype in (np.float64, np.float32):
                name = f"{exchange}, {np.dtype(dtype).name}: {ranks} ranks"
                cases[f"linear: sgd, {name}"] = partial(
                    make, "sgd", exchange, dtype, ranks, model="logistic", l1=0.01, l2=0.05
                )
        for exchange in ("allgather", "dense"):
            cases[f"linear: scd, {exchange}: {ranks} ranks"] = partial(
                make, "scd", exchange, np.float64, ranks, model="logistic", l2=0.05
            )
        cases[f"linear: sgd, svm: {ranks} ranks"] = partial(
            make, "sgd", "ring", np.float64, ranks, model="svm"
        )
    return cases


# ---- bytes and selections --------------------------------------------------------------------------

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
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
    "signs": subject.Signs(),
    "signs, blocks of 7": subject.Signs(7),
}


def _codecs() -> dict[str, Row]:
    def make(codec: Any, dense: bool) -> Digests:
        payloads, decoded = [], []
        for dtype in _DTYPES:
            for step in range(2):
                values = _sparse_noise(17, 5000).to(dtype)
                made = subject.encoded(codec, values, dense=dense, rank=1, step=step)
                payloads.append(made[0])
                decoded.append(made[1])
        return {"payload": sha(payloads), "decoded": sha(decoded)}

    return {
        f"bytes: {name}{', every element' if dense else ''}": partial(make, codec, dense)
        for table, dense in ((_CODECS, False), (_DENSE_CODECS, True))
        for name, codec in table.items()
    }


def _selectors() -> dict[str, Row]:
    def make(new: Callable[[], Any]) -> Digests:
        taken, states = [], []
        for watched in (False, True):
            selector = new()
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                accumulated = torch.randn(6000, generator=generator) * (1 + step)
                taken.append(subject.selected(selector, accumulated, 90, step, watched=watched))
                states.append(selector.state_dict())
        return {"selected": sha(taken), "state": sha(states)}

    return {f"selected: {name}": partial(make, new) for name, new in subject.SELECTORS.items()}
