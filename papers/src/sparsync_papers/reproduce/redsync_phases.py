"""Simulate and predict the phases of a RedSync step: select, mask, pack, communicate, unpack.

In the simulator, the real collectives exchange real messages of the models' layers. Its clock
counts the network's time and, with the constants of ``Machine`` and ``Kernels``, the time of the
GPU's work before and after the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from sparsync.collectives import Allgather, Budgeted
from sparsync.collectives.collective import Collective
from sparsync.published.redsync import BySize
from sparsync.published.redsync.cost_model import (
    PLAIN,
    QUANTIZED,
    SelectionTimes,
    Timing,
    equation_1,
    equation_2,
)
from sparsync.published.redsync.sign_mean import SignMean
from sparsync.sparse import SparseVector
from sparsync.transports.sim import Links, SimCommunicator, simulate
from sparsync_papers.models import MODELS

STAGES = ("select", "mask", "pack", "communicate", "unpack")
DENSITY = 0.001
SHRINK = 16  # divides layers and bandwidths, so that the same times need less memory
_WORD_BYTES = 4


class Kernels(NamedTuple):
    """A stage's work on one layer: the number of kernel launches and of passes over the layer's bytes."""

    launches: float
    passes: float

    def __str__(self) -> str:
        return f"kernels: {self.launches:g}, passes: {self.passes:g}"


@dataclass(frozen=True)
class Machine:
    """A node of Piz Daint."""

    alpha: float = 1.5e-6  # seconds per message (assumed: MPI on Aries)
    # seconds per byte, from 1.5 GB/s between GPU memories (section 6.1, Figure 5)
    beta: float = 1 / 1.5e9
    launch: float = 10e-6  # seconds per kernel (assumed: launched one by one from Python)
    # seconds per byte and pass: three quarters of a P100's 732 GB/s (its data sheet)
    memory: float = 1 / 550e9
    # bytes of memory traffic per byte of a message that is added at scattered indices: for every 4
    # bytes, the GPU reads and writes a sector of 32
    scattered: float = 16.0

    def seconds(self, kernels: Kernels, elements: int) -> float:
        """Return the seconds that a stage takes on a layer of this many elements."""
        passed = self.memory * kernels.passes * _WORD_BYTES * elements
        return self.launch * kernels.launches + passed


# Algorithm 4 computes U = m U + G; V += U; mask = 1; mask[selected] = 0; V *= mask; U *= mask
MOMENTUM_MASK = Kernels(6, 3 + 3 + 1 + 0 + 3 + 3)
MASK = Kernels(4, 3 + 1 + 0 + 3)  # the same without momentum
PACK = Kernels(2, 0)  # one gathers the values; one writes count, indices and values to a message
CLEAR = Kernels(1, 1)  # G = 0, before messages are added to it


@dataclass(frozen=True)
class Model:
    """The sizes of a model's parameter tensors, in registration order, and the work of masking each."""

    name: str
    sizes: tuple[int, ...]
    mask: Kernels


@dataclass(frozen=True)
class Scheme:
    """An exchange, with the number of kernels that add its messages, given layers and ranks."""

    name: str
    collective: Collective
    unpacking: Callable[[int, int], int]


RGC = Scheme("RGC", Allgather(), lambda layers, ranks: layers * ranks)
QUANTISED_RGC = Scheme("quantised RGC", Allgather(SignMean()), lambda layers, ranks: layers * ranks)
SCHEMES = (
    RGC,
    QUANTISED_RGC,
    Scheme("RGC, one kernel per message", Allgather(), lambda layers, ranks: ranks),
    # one kernel for each message of the two phases, then one per layer for the total
    Scheme("budgeted", Budgeted(), lambda layers, ranks: 2 * ranks + layers),
)


@cache
def model_of(name: str, key: str, mask: Kernels, **sizes: int) -> Model:
    """List the parameter tensors of one of ``MODELS``, without allocating them."""
    with torch.device("meta"):
        model = MODELS[key].build(**sizes)
    return Model(name, tuple(parameter.numel() for parameter in model.parameters()), mask)


def resnet50(classes: int = 1000) -> Model:
    """Return ResNet-50: 161 tensors, 25,557,032 elements (1,001 classes: 25,559,081)."""
    return model_of("ResNet-50", "resnet50", MOMENTUM_MASK, classes=classes)


def lstm() -> Model:
    """Return the two-layer language model of section 6.2, with untied weights and plain SGD."""
    return model_of("LSTM 2 x 1500", "lstm_ptb", MASK)


def phases(
    model: Model, scheme: Scheme, ranks: int, shrink: int = SHRINK, machine: Machine = Machine()
) -> dict[str, float]:
    """Return the virtual seconds that each stage of one step takes, averaged over ranks.

    Stages do not overlap. One dense allreduce carries all layers below 128 KB, and one message per
    rank carries all others. If the scheme quantises, the output layer is sent separately and
    unquantised (section 5.2.3).
    """
    groups, small = _groups(model, scheme)

    async def program(comm: SimCommunicator) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        for exchanging, group in groups:
            with comm.stage("select"):
                await comm.compute(sum(_select(n, exchanging) for n in group))
            with comm.stage("mask"):
                await comm.compute(sum(machine.seconds(model.mask, n) for n in group))
            with comm.stage("pack"):
                await comm.compute(sum(machine.seconds(PACK, n) for n in group))
            widths = [-(-n // shrink) for n in group]
            mine = _selected(widths, generator)
            # this stage includes the time that the collective itself counts as unpacking
            with comm.stage("communicate"):
                collective = exchanging.collective.for_layers(widths)
                await collective.reduce(comm, mine, mine.nnz, step=0)
            with comm.stage("unpack"):
                await comm.compute(sum(machine.seconds(CLEAR, n) for n in group))
                await comm.compute(machine.launch * exchanging.unpacking(len(group), ranks))
        with comm.stage("communicate"):
            await comm.allreduce(torch.zeros(small // shrink), "dense")

    links = Links(machine.alpha, machine.beta * shrink, machine.memory * machine.scattered * shrink)
    ledgers = simulate(program, ranks, links=links).ledgers
    return {stage: sum(t.stages[stage] for t in ledgers) / ranks for stage in STAGES}


def predicted_phases(
    model: Model, scheme: Scheme, ranks: int, machine: Machine = Machine()
) -> dict[str, float]:
    """Return the phases in closed form, by Equation 1 per layer, or by Equation 2 for dense layers.

    Headers and the variation of message sizes are ignored. The scheme must be "RGC" or "quantised
    RGC".
    """
    groups, small = _groups(model, scheme)
    found = dict.fromkeys(STAGES, 0.0)
    for exchanging, group in groups:
        words = QUANTIZED if exchanging is QUANTISED_RGC else PLAIN
        # one message carries all layers, so add its latency once
        transfer = equation_1(ranks, DENSITY, alpha=0.0, beta=machine.beta, words_per_entry=words)
        added = Timing(machine.launch, machine.memory * machine.scattered * words * DENSITY)
        rounds = (ranks - 1).bit_length()
        found["communicate"] += rounds * machine.alpha
        for n in group:
            nbytes = _WORD_BYTES * n
            found["select"] += _select(n, exchanging)
            found["mask"] += machine.seconds(model.mask, n)
            found["pack"] += machine.seconds(PACK, n)
            found["communicate"] += transfer.seconds(nbytes)
            found["unpack"] += machine.seconds(CLEAR, n) + ranks * added.seconds(nbytes)
    whole = equation_2(ranks, alpha=machine.alpha, beta=machine.beta)
    found["communicate"] += whole.seconds(_WORD_BYTES * small)
    return found


def _groups(model: Model, scheme: Scheme) -> tuple[list[tuple[Scheme, list[int]]], int]:
    """Return the groups of layers that share a message, and the number of elements sent dense."""
    method = BySize().method
    sizes = [n for n in model.sizes if method(_WORD_BYTES * n) != "dense"]
    small = sum(model.sizes) - sum(sizes)
    if scheme is QUANTISED_RGC:
        return [(scheme, sizes[:-1]), (RGC, sizes[-1:])], small
    return [(scheme, sizes)], small


def _select(
    n: int,
    scheme: Scheme,
    times: SelectionTimes = SelectionTimes(),  # noqa: B008 (frozen)
) -> float:
    """Return the seconds that it takes to select from a layer of n elements."""
    searching = times.search if scheme is QUANTISED_RGC else times.searched
    trimmed = BySize().method(_WORD_BYTES * n) == "trimmed"
    return (times.trimmed if trimmed else searching).seconds(_WORD_BYTES * n)


def _selected(widths: Sequence[int], generator: torch.Generator) -> SparseVector:
    """Return k of n entries per layer: one at a random position in each of k cells of equal width."""
    indices, start = [], 0
    for width in widths:
        k = max(1, round(DENSITY * width))
        places = (torch.arange(k) + torch.rand(k, generator=generator)) * (width / k)
        indices.append(start + places.long().clamp(max=width - 1))
        start += width
    chosen = torch.cat(indices)
    return SparseVector(chosen, torch.ones(chosen.numel()), start)
