"""Simulated training: real reducers on virtual ranks, one row per algorithm.

With ``--scale C``, a small model takes as long as a large one: n / C elements represent n, and k / C
entries represent k.  Bytes of entries and values count C times, but headers, counts and histograms only
once.  Work per element, per entry and per byte costs C times as much.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sparsync.cli.launch import on_one_thread
from sparsync.cli.simulate.averages import simulate_averaging
from sparsync.cli.simulate.gradient_sources import gradients, placed
from sparsync.cli.simulate.settings import SPREAD, Contender, Scheme, SimulationSettings
from sparsync.feedback.reducer import Reducer
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.ledger import Framing, Several
from sparsync.transports.sim import Prices, SimCommunicator, Simulation, Weight, simulate
from sparsync.units import Slot, Unit
from sparsync.wire.codec import Header, MessageFraming

__all__ = [
    "SimulatedRow",
    "SimulatedStep",
    "default_scale",
    "scaled_for_speed",
    "simulate_training",
    "weigher",
]

# bytes of memory per held entry: index and value, and half as much again while merging
_ENTRY_BYTES = 16
# Full-size dense sums would take seconds to simulate.  Apart from latencies, their times are
# proportional to n.  So they are scaled down to blocks of this many elements, which need no padding.
_BLOCK = 64
_DENSE = ("dense", "ring-dense")
# with these algorithms, a rank holds at most this number times k entries, whatever P is; with all other
# algorithms, it holds the whole sum, up to n entries
_BOUNDED = MappingProxyType({"oktopk": 6, "budgeted": 6, "halving": 6, "gtopk": 6})
# with these algorithms, messages hold P k entries
_GATHERING = ("allgather", "gaussiank", "redsync", "redsync-quantized")
# the backward pass's share of computation: it has two matrix products per layer, the forward pass one
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class SimulatedStep:
    """One step; its fields are the JSON keys.  Parts are means over ranks and add up to ``seconds``."""

    seconds: float  # from the start of all ranks until the last one ends
    seconds_computation: float  # forward and backward pass
    seconds_selection: float  # accumulating and selecting
    seconds_packing: float  # packing, unpacking and summing
    seconds_communication: float  # the rest: network time and waits that no work hides
    bytes_sent: float  # maximum over ports
    bytes_received: float
    messages: float  # maximum over ranks
    # maxima over ports of messages, bytes and seconds, in each direction
    phases: dict[str, dict[str, float]]
    # for ranks, then for nodes: bytes and busy seconds in each direction
    ports: dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class SimulatedRow:
    """One algorithm; its fields and the fields of its mean step are the keys of the JSON."""

    algorithm: str
    ranks: int
    scale: float
    buckets: int
    overlap: bool  # exchanged during the backward pass
    wall_seconds: float  # duration of the simulation on this machine
    steps: list[SimulatedStep]  # the reported steps

    def mean(self, field: str) -> float:
        """Return a field's mean over the steps, e.g. ``mean("seconds")``."""
        return fmean(getattr(step, field) for step in self.steps)


def simulate_training(
    settings: SimulationSettings,
    show: Callable[[str], AbstractContextManager[Callable[[int], None]]] = (
        lambda name: nullcontext(lambda total: None)
    ),
) -> list[SimulatedRow]:
    """Simulate every algorithm, the baselines first.

    Args:
        settings: the training to simulate.
        show: opens the progress bar of the row with the given name, and yields a function.  That
            function is called whenever a rank ends a step, with the total number of such calls.

    Example:
        >>> settings = SimulationSettings(("oktopk",), ranks=4, model_size=1_000_000, compute=0.01)
        >>> rows = simulate_training(settings)
        >>> [row.algorithm for row in rows]
        ['Dense', 'DenseOvlp', 'oktopk']
        >>> rows[2].mean("seconds") < rows[0].mean("seconds"), rows[2].mean("seconds_computation")
        (True, 0.01)
    """
    rows = []
    for contender in settings.contenders():
        with on_one_thread(), show(contender.name) as advance:
            begun = time.perf_counter()
            if isinstance(contender, Scheme):
                scale, steps = _averaged(contender, settings, advance)
            else:
                ranks = _Ranks(contender, settings, advance)
                scale = ranks.scale
                all_ = [ranks.step() for _ in range(settings.warmup + settings.steps)]
                steps = all_[settings.warmup :]
            rows.append(
                SimulatedRow(
                    contender.name,
                    settings.ranks,
                    scale,
                    1 if isinstance(contender, Scheme) else contender.buckets,
                    isinstance(contender, Contender) and contender.overlap,
                    time.perf_counter() - begun,
                    steps,
                )
            )
    return rows


def _averaged(
    scheme: Scheme, settings: SimulationSettings, advance: Callable[[int], None]
) -> tuple[float, list[SimulatedStep]]:
    """Return a scheme's scale and steps; the port traffic of each step is the mean over all steps."""
    run = simulate_averaging(scheme, settings, weigher, advance)
    ports, phases = _traffic(run.simulation, run.scale, run.steps)
    messages = max(ledger.total().messages_sent for ledger in run.simulation.ledgers) / run.steps
    selection = run.stages["select"]
    packing = run.stages["pack"] + run.stages["unpack"]
    return run.scale, [
        SimulatedStep(
            seconds,
            computation,
            selection,
            packing,
            seconds - computation - selection - packing,
            max(ports["send"]["bytes"]),
            max(ports["receive"]["bytes"]),
            messages,
            phases,
            ports,
        )
        for seconds, computation in zip(run.seconds, run.computation, strict=True)
    ]


class _Ranks:
    """The virtual ranks of a row: their reducers persist from step to step, their clocks do not."""

    def __init__(
        self, contender: Contender, settings: SimulationSettings, advance: Callable[[int], None]
    ) -> None:
        self.contender, self.settings = contender, settings
        self.scale = settings.scale or default_scale(contender, settings)
        self._advance, self._ends = advance, settings.ranks * (settings.warmup + settings.steps)
        self.source = gradients(contender, settings, self.scale)
        units = [
            Unit((Slot(f"bucket {i}", 0, held),), torch.float32, torch.device("cpu"))
            for i, held in enumerate(self.source.held)
        ]
        self.reducers = [
            Reducer(
                SoloCommunicator(),
                units,
                placed(contender.algorithm, self.source),
                self.source.density,
            )
            for _ in range(settings.ranks)
        ]
        machine = settings.machine
        self.prices = Prices(
            weigher(self.scale),
            encode=machine.encode,
            decode=machine.decode,
            gamma=machine.gamma * self.scale,
        )
        self._select = machine.select * self.scale if contender.selects else 0.0
        self._pace = random.Random(settings.seed)

    def step(self) -> SimulatedStep:
        """Run the next step of all ranks, which start at the same time."""
        settings, slower = self.settings, dict(self.settings.stragglers)
        self._computation = [
            max(self._pace.gauss(settings.compute, settings.spread), 0.0) * slower.get(rank, 1.0)
            for rank in range(settings.ranks)
        ]
        simulation = simulate(
            self._program, settings.ranks, links=settings.links, prices=self.prices
        )
        return _summary(simulation, self._computation)

    async def _program(self, comm: SimCommunicator) -> None:
        """Run a rank's step: computation, selection and exchange, with their times."""
        reducer, seconds = self.reducers[comm.rank], self._computation[comm.rank]
        reducer.move_to(comm)
        parts, sizes = self.source.draw(comm.rank, reducer.step), self.source.sizes
        overlap, exchanges = self.contender.overlap, []
        await comm.compute(seconds * (1 - _BACKWARD) if overlap else seconds)
        for unit in reversed(range(len(parts))):  # the backward pass reaches the last layers first
            if overlap:
                await comm.compute(seconds * _BACKWARD * (sizes[unit] / sum(sizes)))
            comm.charge("select", self._select * sizes[unit])
            reducer.accumulate(unit, 0, parts[unit])
            if len(parts) > 1:
                exchanges.append(comm.spawn(reducer.exchange(unit)))
        if len(parts) == 1:
            await reducer.exchange(0)
        else:
            exchanges.append(comm.spawn(reducer.share()))
        for exchange in exchanges:
            await exchange
        reducer.commit()
        self._advance(self._ends)


def _summary(simulation: Simulation[None], computation: list[float]) -> SimulatedStep:
    """Split a step's time into the ranks' work and the rest, which is communication or waiting."""
    stages = [ledger.stages for ledger in simulation.ledgers]
    work = [fmean(of.get(name, 0.0) for of in stages) for name in ("select", "pack", "unpack")]
    selection, packing = work[0], work[1] + work[2]
    rest = simulation.seconds - fmean(computation) - selection - packing
    ports, phases = _traffic(simulation)
    return SimulatedStep(
        simulation.seconds,
        fmean(computation),
        selection,
        packing,
        rest,
        max(ports["send"]["bytes"]),
        max(ports["receive"]["bytes"]),
        max(ledger.total().messages_sent for ledger in simulation.ledgers),
        phases,
        ports,
    )


def _traffic(
    simulation: Simulation[Any], scale: float = 1.0, steps: int = 1
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Return every port's bytes and busy seconds per step, and the maxima over ports for each phase.

    Args:
        simulation: the simulation of one or more steps.
        scale: a factor on all counts of bytes.
        steps: number of steps.
    """
    ports: dict[str, dict[str, list[float]]] = {}
    phases: dict[str, dict[str, float]] = {}
    for way, of in (("send", simulation.sending), ("receive", simulation.receiving)):
        ports[way] = {
            "bytes": [port.nbytes * scale / steps for port in of.values()],
            "busy_seconds": [port.seconds / steps for port in of.values()],
        }
        for name, usage in (phase for port in of.values() for phase in port.phases.items()):
            most = phases.setdefault(name, {})
            for key, value in (
                ("messages", usage.messages / steps),
                (f"bytes_{way}", usage.nbytes * scale / steps),
                (f"seconds_{way}", usage.seconds / steps),
            ):
                most[key] = max(most.get(key, 0.0), value)
    return ports, phases


# ---- the scale -------------------------------------------------------------------------------------


def default_scale(contender: Contender, settings: SimulationSettings) -> float:
    """Return the smallest C that lets the virtual ranks fit into ``settings.memory``.

    For dense sums of zeros, C is larger, which saves time.

    Example:
        >>> settings = SimulationSettings(ranks=4, model_size=10_000)
        >>> [default_scale(contender, settings) for contender in settings.contenders()]
        [39.0625, 39.0625, 1.0, 1.0]
    """
    ranks, size, k = settings.ranks, settings.model_size, settings.model_size * settings.density
    if scaled_for_speed(contender, settings):
        most = settings.memory / (_ENTRY_BYTES * ranks)
        width = max(min(_BLOCK, int(most / (contender.buckets * ranks))), 1)
        return max(size / (contender.buckets * ranks * width), 1.0)
    name = contender.algorithm.name
    if not contender.selects:
        held = float(size)
    elif name in _BOUNDED:
        held = _BOUNDED[name] * k
    elif name in _GATHERING:
        held = ranks * k
    else:
        held = min(ranks * k, 2.0 * size)
    if contender.selects and settings.inputs != SPREAD:
        held += size
    return max(ranks * held * _ENTRY_BYTES / settings.memory, 1.0)


def scaled_for_speed(contender: Contender, settings: SimulationSettings) -> bool:
    """Return whether the default scale is larger than memory requires, to save time."""
    return contender.algorithm.name in _DENSE and settings.inputs == SPREAD


def weigher(scale: float) -> Callable[[Tensor, Framing], Weight]:
    """Return a function that computes how many bytes and entries a message represents."""

    def weigh(payload: Tensor, framing: Framing) -> Weight:
        blocks = [payload]
        if isinstance(framing, Several):
            blocks, framing = framing.cut(payload), framing.framing
        nbytes = entries = 0.0
        for block in blocks:
            parts = framing.parts(block)
            nbytes += parts.header + parts.control + scale * (parts.index + parts.value)
            if parts.index and isinstance(framing, MessageFraming):
                entries += scale * Header.read(block).entries
        return Weight(nbytes, entries)

    return weigh
