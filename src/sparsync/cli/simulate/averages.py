"""Simulated averaging: a scheme's own code on virtual ranks, which start their steps independently.

A model of n elements is simulated by n / C elements on links that are C times slower.  So every byte
counts C times, including the bytes of headers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, final

import torch
from torch import Tensor

from sparsync.averaging.averager import Averager
from sparsync.cli.simulate.settings import Scheme, SimulationSettings
from sparsync.transports.ledger import Framing
from sparsync.transports.sim import (
    Prices,
    Route,
    SimCommunicator,
    Simulation,
    Topology,
    Weight,
    simulate,
)

__all__ = ["AveragedRun", "scheme_scale", "simulate_averaging"]

# the largest number of vectors of n / C elements that a rank holds: in memories, results and messages
_COPIES = 13
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class AveragedRun:
    """A simulated run of a scheme.

    Attributes:
        scale: the factor C.
        seconds: seconds of each reported step, mean over ranks.
        computation: seconds of computation of each reported step, mean over ranks.
        simulation: the simulation of all steps, including the warm-up; its ports count the bytes of
            n / C elements.
        stages: seconds of work per step by stage, mean over ranks.
        steps: total number of steps, including the warm-up.
    """

    scale: float
    seconds: list[float]
    computation: list[float]
    simulation: Simulation[list[float]]
    stages: Mapping[str, float]
    steps: int


def scheme_scale(settings: SimulationSettings) -> float:
    """Return the smallest factor C (at least 1) that lets all ranks fit into ``settings.memory``."""
    held = settings.memory / (settings.ranks * _COPIES * _ELEMENT_BYTES)
    return max(settings.model_size / held, 1.0)


def simulate_averaging(
    scheme: Scheme,
    settings: SimulationSettings,
    weigher: Callable[[float], Callable[[Tensor, Framing], Weight]],
    advance: Callable[[int], None],
) -> AveragedRun:
    """Simulate whole periods of a scheme; all ranks start from the same model.

    Args:
        scheme: the scheme's row.
        settings: ``steps`` and ``warmup`` are rounded up to whole periods of the scheme.
        weigher: maps the scale to a function that counts the entries that a message represents.
        advance: called whenever a rank ends a step.
    """
    ranks = settings.ranks
    scale = settings.scale or scheme_scale(settings)
    size = max(round(settings.model_size / scale), 1)
    period = _period(scheme.make())
    # run whole periods; otherwise a step's share of a global average would depend on where the run
    # begins and ends
    before, reported = (-(-n // period) * period for n in (settings.warmup, settings.steps))
    steps = before + reported
    pace, slower = random.Random(settings.seed), dict(settings.stragglers)
    # the same draws as for algorithms that exchange gradients, so the same ranks are late in each step
    work = [
        [
            max(pace.gauss(settings.compute, settings.spread), 0.0) * slower.get(rank, 1.0)
            for rank in range(ranks)
        ]
        for _ in range(steps)
    ]

    async def program(comm: SimCommunicator) -> list[float]:
        averager, vector, ends = scheme.make(), torch.zeros(size), [0.0]
        generator = torch.Generator().manual_seed(settings.seed + comm.rank)
        update = torch.randn(size, generator=generator)
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            await comm.compute(work[step][comm.rank])
            if averager.is_due(step):
                vector = await averager.average(comm, vector + update, step)
            ends.append(comm.now)
            advance(ranks * steps)
        return ends

    weigh, machine = weigher(scale), settings.machine

    def entries_only(payload: Tensor, framing: Framing) -> Weight:
        return Weight(payload.numel(), weigh(payload, framing).entries)

    simulation = simulate(
        program,
        ranks,
        links=_Slower(settings.links, scale),
        prices=Prices(
            entries_only,
            encode=machine.encode,
            decode=machine.decode,
            gamma=machine.gamma * scale,
        ),
    )
    means = [fmean(ends) for ends in zip(*simulation.results, strict=True)]
    stages = {
        stage: fmean(ledger.stages.get(stage, 0.0) for ledger in simulation.ledgers) / steps
        for stage in ("select", "pack", "unpack")
    }
    seconds = [end - start for start, end in pairwise(means)]
    return AveragedRun(
        scale,
        seconds[before:],
        [fmean(step) for step in work[before:]],
        simulation,
        stages,
        steps,
    )


def _period(averager: Averager) -> int:
    """Return the number of steps after which a scheme repeats its schedule: its period, or 1."""
    own: Any = getattr(averager, "settings", averager)
    periods = (getattr(own, name, None) for name in ("period", "sync_period"))
    return next((period for period in periods if isinstance(period, int)), 1)


@final
class _Slower(Topology):
    """Links on which every byte takes ``factor`` times as long."""

    def __init__(self, links: Topology, factor: float) -> None:
        self.links, self.factor = links, factor
        self.gamma, self.ports = links.gamma * factor, links.ports

    def route(self, source: int, dest: int) -> Route:
        """Return the route with its beta multiplied by ``factor``."""
        route = self.links.route(source, dest)
        return route._replace(beta=route.beta * self.factor)
