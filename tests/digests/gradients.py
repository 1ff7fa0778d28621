"""Gradients that are averaged step by step: every preset, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import subject
from .canonical import sha

__all__ = ["rows", "steps_of"]

STEPS = 6
RANKS = (1, 2, 3, 4, 7)
DENSITY = 0.02
LAYERS = {"a": 4000, "b": 1, "c": 2999, "d": 1000}  # elements; "d" is the output layer

Digests = dict[str, str]
Row = Callable[[], Digests]

# name -> (preset, its options, what the reducer is told); each on all of RANKS
DEFAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    name: (name, {}, {}) for name in subject.PRESETS
}

_RGC = {"compress_thd": 4096}  # bytes: "b" and "d" are exchanged whole
OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "budgeted, int8": ("budgeted", {"codec": subject.Packed("int8")}, {}),
    "budgeted, coo, budget 1.5": ("budgeted", {"codec": subject.Coo(), "budget": 1.5}, {}),
    "halving, int8": ("halving", {"codec": subject.Packed("int8")}, {}),
    "oktopk, no cap": ("oktopk", {"cap": None}, {}),
    "oktopk, periods of 2": ("oktopk", {"threshold_period": 2, "repartition_period": 2}, {}),
    "oktopk, allgathered threshold": (
        "oktopk",
        {"global_threshold": "allgather", "balanced_split": False, "threshold_period": 2},
        {},
    ),
    "oktopk-paper, periods of 2": (
        "oktopk-paper",
        {"threshold_period": 2, "repartition_period": 2},
        {},
    ),
    "auto, slow links": (
        "auto",
        {"machine": subject.Machine(beta=1e-6), "check_period": 2},
        {},
    ),
    "allgather, no cap": ("allgather", {"cap": None}, {}),
    "dynamic, qsgd": ("dynamic", {"codec": subject.StreamCodec(dense=subject.Qsgd(8))}, {}),
    "gaussiank, int8": ("gaussiank", {"codec": subject.Packed("int8")}, {}),
    "gtopk, packed": ("gtopk", {"codec": subject.Packed()}, {}),
    "recursive-doubling, bf16": (
        "recursive-doubling",
        {"codec": subject.StreamCodec(subject.Packed())},
        {},
    ),
    "redsync, layers": ("redsync", {**_RGC, "fusion_bytes": 8192}, {}),
    "redsync, search": ("redsync", {**_RGC, "thsd2": 0}, {}),
    "redsync, exact": ("redsync", {**_RGC, "thsd1": 1e6}, {}),
    "redsync, all lengths": ("redsync", {**_RGC, "cap": None}, {}),
    "redsync-quantized, layers": ("redsync-quantized", _RGC, {}),
    "redsync-quantized, as published": (
        "redsync-quantized",
        {**_RGC, "thsd2": 0, "cap": None, "keep_error": False},
        {},
    ),
    "redsync-quantized, packed": (
        "redsync-quantized",
        {**_RGC, "codec": subject.SignMean("packed")},
        {},
    ),
    "signs, blocks of 64": ("signs", {"block": 64}, {}),
    "sparcml, error kept": ("sparcml", {"keep_error": True}, {}),
    "sparcml, reduced": ("sparcml", {"quantize": "reduced"}, {}),
    "sparcml, not quantised": ("sparcml", {"bits": None}, {}),
    "split-allgather, no cap": ("split-allgather", {"cap": None}, {}),
    "budgeted, 3 units": ("budgeted", {}, {"unit_bytes": 4096}),
    "oktopk, 3 units": ("oktopk", {}, {"unit_bytes": 4096}),
    "allgather, 3 units": ("allgather", {}, {"unit_bytes": 4096}),
    "gaussiank, 3 units": ("gaussiank", {}, {"unit_bytes": 4096}),
    "halving, 3 units, float64": (
        "halving",
        {"codec": subject.Coo()},
        {"unit_bytes": 4096, "dtype": torch.float64},
    ),
    "budgeted, bfloat16": ("budgeted", {}, {"dtype": torch.bfloat16}),
    "oktopk, float64": ("oktopk", {}, {"dtype": torch.float64}),
    "oktopk, warm-up, 3 units": (
        "oktopk",
        {},
        {"warmup": subject.Warmup(4, (0.25, 0.05)), "unit_bytes": 4096},
    ),
    "budgeted, dense warm-up": ("budgeted", {}, {"warmup": subject.Warmup(3)}),
    "budgeted, momentum": ("budgeted", {}, {"correction": subject.Correction(momentum=0.9)}),
    "redsync, Nesterov, clipped": (
        "redsync",
        _RGC,
        {"correction": subject.Correction(momentum=0.9, nesterov=True, clip=50.0)},
    ),
    "oktopk, clipped to the last norm, decay": (
        "oktopk",
        {},
        {
            "correction": subject.Correction(
                momentum=0.5, clip=50.0, clip_norm="previous", weight_decay=0.01
            )
        },
    ),
    "budgeted, adaptive density": (
        "budgeted",
        {},
        {"density": subject.AdaptiveDensity(0.02, high=0.05, period=2), "unit_bytes": 4096},
    ),
    "allgather, xi": ("allgather", {}, {"xi_period": 2}),
}

_FEWER = (2, 3, 4)  # ranks of what has options


def rows() -> dict[str, Row]:
    """Return what is to be recorded, by name."""
    table = {}
    for cases, ranks in ((DEFAULTS, RANKS), (OPTIONS, _FEWER)):
        for name, case in cases.items():
            for world_size in ranks:
                table[f"gradients: {name}: {world_size} ranks"] = _row(case, world_size)
    for name in ("budgeted", "oktopk, 3 units", "budgeted, momentum"):
        case = {**DEFAULTS, **OPTIONS}[name]
        table[f"gradients: {name}: refused and resumed"] = lambda case=case: _interrupted(case)
    return table


def _row(case: tuple[str, Mapping[str, Any], Mapping[str, Any]], world_size: int) -> Row:
    def make() -> Digests:
        async def program(comm: Any) -> dict[str, Any]:
            return await steps_of(comm, *case)

        simulation = subject.simulate(program, world_size)
        results = simulation.results
        averages = [result.pop("averages") for result in results]
        assert all(a == averages[0] for a in averages), "ranks have different averages"
        digests = {key: sha([result[key] for result in results]) for key in results[0]}
        return {"averages": averages[0], **digests, "seconds": sha(simulation.seconds)}

    return make


async def steps_of(
    comm: Any, preset: str, options: Mapping[str, Any], told: Mapping[str, Any]
) -> dict[str, Any]:
    """Average the gradients of all steps on this rank; return digests of what came of it."""
    reducer = _reducer(comm, preset, options, told)
    averages, lost, residuals, messages = [], [], [], []
    for step in range(STEPS):
        averages += await _step(reducer, step)
        lost += [vector.to_dense() for vector in reducer.lost]
        residuals.append([None if r.value is None else r.value.clone() for r in reducer.residuals])
        messages.append(_traffic(comm))
    return {
        "averages": sha(averages),
        "lost": sha(lost),
        "residuals": sha(residuals),
        "state": sha(subject.reducer_state(reducer)),
        "messages": sha(messages),
    }


def _interrupted(case: tuple[str, Mapping[str, Any], Mapping[str, Any]]) -> Digests:
    """Refuse a step with NaN, save, restore into another reducer, and go on."""

    async def program(comm: Any) -> list[str]:
        reducer = _reducer(comm, *case)
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
        other = _reducer(comm, *case)
        await subject.restore_reducer(other, saved)
        averages = [await _step(other, step) for step in range(4, 6)]
        return [sha(averages), sha(saved), sha(subject.reducer_state(other))]

    results = subject.simulate(program, 3).results
    averages, saved, state = zip(*results, strict=True)
    assert len(set(averages)) == 1, "ranks have different averages"
    return {"averages": averages[0], "saved": sha(saved), "state": sha(state)}


def _reducer(
    comm: Any, preset: str, options: Mapping[str, Any], told: Mapping[str, Any]
) -> subject.Reducer:
    """Make what ``attach`` makes of a model with these layers."""
    told = dict(told)
    algorithm = subject.resolve(preset, **options)
    dtype = told.pop("dtype", torch.float32)
    unit_bytes = told.pop("unit_bytes", algorithm.unit_bytes)
    density = told.pop("density", DENSITY)
    named = [(name, torch.zeros(size, dtype=dtype)) for name, size in LAYERS.items()]
    output = ("d",) if algorithm.output else ()
    units = subject.plan_units(named, unit_bytes, algorithm.compress, output)
    return subject.Reducer(comm, units, algorithm, density, **told)


async def _step(reducer: subject.Reducer, step: int) -> list[torch.Tensor]:
    gradients = _gradients(reducer, step)
    await reducer.reduce(gradients, _weights(reducer))
    return gradients


def _gradients(reducer: subject.Reducer, step: int) -> list[torch.Tensor]:
    """Draw fixed noise with long tails; what ranks have in common grows along the vector."""
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


def _traffic(comm: Any) -> dict[str, Any]:
    """Return the bytes and messages of all steps so far, by phase."""
    return {phase: traffic.as_dict() for phase, traffic in comm.ledger.by_phase().items()}
