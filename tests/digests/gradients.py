"""Digest gradients that are averaged step by step, with every preset on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import subject
from .canonical import sha

__all__ = ["digests_of", "rows", "steps_of"]

STEPS = 6
RANKS = (1, 2, 3, 4, 7)
DENSITY = 0.02
LAYERS = {"a": 4000, "b": 1, "c": 2999, "d": 1000}  # elements; "d" is the output layer

Digests = dict[str, str]
Row = Callable[[], Digests]

# "PRESET, ..." -> options of the preset, and options of the reducer
Options = dict[str, Any]
DEFAULTS: dict[str, Options] = {name: {} for name in subject.PRESETS}

_RGC = {"compress_thd": 4096}  # bytes: "b" and "d" are exchanged whole
_UNITS = {"unit_bytes": 4096}
_PUBLISHED = {"thsd2": 0, "cap": None, "keep_error": False}
_PERIODS = {"threshold_period": 2, "repartition_period": 2}
_ALLGATHERED = {"global_threshold": "allgather", "balanced_split": False, "threshold_period": 2}
_NESTEROV = subject.Correction(momentum=0.9, nesterov=True, clip=50.0)
_PREVIOUS = subject.Correction(0.5, clip=50.0, clip_norm="previous", weight_decay=0.01)
OPTIONS: dict[str, Options] = {
    "budgeted, int8": {"codec": subject.Packed("int8")},
    "budgeted, coo, budget 1.5": {"codec": subject.Coo(), "budget": 1.5},
    "halving, int8": {"codec": subject.Packed("int8")},
    "oktopk, no cap": {"cap": None},
    "oktopk, periods of 2": _PERIODS,
    "oktopk, allgathered threshold": _ALLGATHERED,
    "oktopk-paper, periods of 2": _PERIODS,
    "auto, slow links": {"machine": subject.Machine(beta=1e-6), "check_period": 2},
    "allgather, no cap": {"cap": None},
    "dynamic, qsgd": {"codec": subject.StreamCodec(dense=subject.Qsgd(8))},
    "gaussiank, int8": {"codec": subject.Packed("int8")},
    "gtopk, packed": {"codec": subject.Packed()},
    "recursive-doubling, bf16": {"codec": subject.StreamCodec(subject.Packed())},
    "redsync, layers": {**_RGC, "fusion_bytes": 8192},
    "redsync, search": {**_RGC, "thsd2": 0},
    "redsync, exact": {**_RGC, "thsd1": 1e6},
    "redsync, all lengths": {**_RGC, "cap": None},
    "redsync-quantized, layers": _RGC,
    "redsync-quantized, as published": {**_RGC, **_PUBLISHED},
    "redsync-quantized, packed": {**_RGC, "codec": subject.SignMean("packed")},
    "quantised, 4 bits, blocks of 64": {"bits": 4, "block": 64},
    "quantised, 16 bits": {"bits": 16},
    "quantised, float64": {"dtype": torch.float64},
    "sparcml, error kept": {"keep_error": True},
    "sparcml, reduced": {"quantize": "reduced"},
    "sparcml, not quantised": {"bits": None},
    "split-allgather, no cap": {"cap": None},
    "budgeted, 3 units": _UNITS,
    "oktopk, 3 units": _UNITS,
    "allgather, 3 units": _UNITS,
    "gaussiank, 3 units": _UNITS,
    "halving, 3 units, float64": {**_UNITS, "codec": subject.Coo(), "dtype": torch.float64},
    "budgeted, bfloat16": {"dtype": torch.bfloat16},
    "oktopk, float64": {"dtype": torch.float64},
    "oktopk, warm-up, 3 units": {**_UNITS, "warmup": subject.Warmup(4, (0.25, 0.05))},
    "budgeted, dense warm-up": {"warmup": subject.Warmup(3)},
    "budgeted, momentum": {"correction": subject.Correction(momentum=0.9)},
    "redsync, Nesterov, clipped": {**_RGC, "correction": _NESTEROV},
    "oktopk, clipped to the last norm, decay": {"correction": _PREVIOUS},
    "allgather, xi": {"xi_period": 2},
}

_FEWER = (2, 3, 4)  # ranks for rows that have options
_OF_THE_REDUCER = ("warmup", "correction", "xi_period")


def rows() -> dict[str, Row]:
    """Return the results to record, by name."""
    table = {
        f"gradients: {name}: {ranks} ranks": partial(_averaged, name, ranks)
        for names, worlds in ((DEFAULTS, RANKS), (OPTIONS, _FEWER))
        for name in names
        for ranks in worlds
    }
    for name in ("budgeted", "oktopk, 3 units", "budgeted, momentum"):
        table[f"gradients: {name}: refused and resumed"] = partial(_interrupted, name)
    return table


def _averaged(name: str, ranks: int) -> Digests:
    async def program(comm: Any) -> dict[str, Any]:
        return await steps_of(comm, name)

    return digests_of(program, ranks, timed=True)


async def steps_of(comm: Any, name: str) -> dict[str, Any]:
    """Average gradients on every step of this rank; return the results."""
    reducer = _reducer(comm, name)
    averages, lost, residuals, messages = [], [], [], []
    for step in range(STEPS):
        averages += await _step(reducer, step)
        lost += [vector.to_dense() for vector in reducer.lost]
        residuals.append([None if r.value is None else r.value.clone() for r in reducer.residuals])
        messages.append(traffic_of(comm))
    return {
        "averages": sha(averages),
        "lost": sha(lost),
        "residuals": sha(residuals),
        "state": sha(subject.reducer_state(reducer)),
        "messages": sha(messages),
    }


def _interrupted(name: str) -> Digests:
    """Refuse a step because of NaN, save the state, restore it in another reducer, and continue."""

    async def program(comm: Any) -> dict[str, Any]:
        reducer = _reducer(comm, name)
        for step in range(3):
            await _step(reducer, step)
        broken = _gradients(reducer, 3)
        if comm.rank == comm.world_size - 1:
            broken[-1][5] = float("nan")
        try:
            await reducer.reduce(broken, _weights(reducer))
        except ArithmeticError:
            reducer.skip()
        saved = subject.reducer_state(reducer)
        other = _reducer(comm, name)
        await subject.restore_reducer(other, saved)
        averages = [await _step(other, step) for step in range(4, 6)]
        state = sha(subject.reducer_state(other))
        return {"averages": sha(averages), "saved": sha(saved), "state": state}

    return digests_of(program, 3)


def digests_of(program: Any, ranks: int, *, timed: bool = False) -> Digests:
    """Run a program on virtual ranks that returns values by name; averages must be equal on all ranks."""
    simulation = subject.simulate(program, ranks)
    results = simulation.results
    digests = {key: sha([result[key] for result in results]) for key in results[0]}
    if "averages" in digests:
        (digests["averages"],) = {result["averages"] for result in results}
    return {**digests, "seconds": sha(simulation.seconds)} if timed else digests


def _reducer(comm: Any, name: str) -> subject.Reducer:
    """Make a reducer as ``attach`` would for a model with these layers."""
    options = dict({**DEFAULTS, **OPTIONS}[name])
    told = {"density": DENSITY}
    told |= {key: options.pop(key) for key in _OF_THE_REDUCER if key in options}
    dtype, unit_bytes = options.pop("dtype", torch.float32), options.pop("unit_bytes", None)
    algorithm = subject.resolve(name.partition(",")[0], **options)
    named = [(layer, torch.zeros(size, dtype=dtype)) for layer, size in LAYERS.items()]
    output = ("d",) if algorithm.output else ()
    units = subject.plan_units(
        named, unit_bytes or algorithm.unit_bytes, algorithm.compress, output
    )
    return subject.Reducer(comm, units, algorithm, **told)


async def _step(reducer: subject.Reducer, step: int) -> list[torch.Tensor]:
    gradients = _gradients(reducer, step)
    await reducer.reduce(gradients, _weights(reducer))
    return gradients


def _gradients(reducer: subject.Reducer, step: int) -> list[torch.Tensor]:
    """Draw reproducible noise with long tails; the part that ranks share grows along the vector."""
    common = torch.Generator().manual_seed(7919 + step)
    own = torch.Generator().manual_seed(1000 * step + reducer.comm.rank)
    drawn = []
    for unit in reducer.units:
        shared, noise = (torch.randn(unit.size, generator=g) for g in (common, own))
        mixed = noise + shared * torch.linspace(0, 2, unit.size)
        drawn.append((mixed * mixed * mixed).to(unit.dtype))
    return drawn


def _weights(reducer: subject.Reducer) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, unit.size, dtype=unit.dtype) for unit in reducer.units]


def traffic_of(comm: Any) -> dict[str, Any]:
    """Return the bytes and messages of all steps so far, by phase."""
    return {phase: traffic.as_dict() for phase, traffic in comm.ledger.by_phase().items()}
