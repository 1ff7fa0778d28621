"""Where a step of RedSync goes (its Figure 10): select, mask, pack, communicate, unpack.

    python benchmarks/redsync_phases.py     (2 minutes; writes benchmarks/redsync_phases.md and .png)

The real collectives exchange real messages of the models' layers on the simulator; its clock charges
the network and, by the constants of ``Machine`` and ``Kernels``, what a GPU does before and after.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from sparsync.collectives import Allgather, Budgeted
from sparsync.collectives.base import Collective
from sparsync.planning.redsync_costs import SelectionTimes
from sparsync.selection.by_size import BySize
from sparsync.sparse import SparseVector
from sparsync.transports.sim import Links, SimCommunicator, simulate
from sparsync.wire.sign_mean import SignMean

RANKS = (2, 4, 8, 16, 32, 64, 128)
STAGES = ("select", "mask", "pack", "communicate", "unpack")
DENSITY = 0.001
WORD_BYTES = 4
SHRINK = 16  # layers and bandwidths are divided by it: the same seconds, in less memory


@dataclass(frozen=True)
class Machine:
    """A node of Piz Daint.

    Attributes:
        alpha: seconds per message.  Ours: what MPI takes on Aries.
        beta: seconds per byte: 1.5 GB/s between GPU memories (section 6.1, Figure 5).
        launch: seconds per kernel.  Ours: launched one by one from Python.
        memory: seconds per byte and pass: three quarters of a P100's 732 GB/s (its data sheet).
        scattered: passes per byte of a message that is added at its indices: every 4 bytes of it
            read and write a sector of 32.
    """

    alpha: float = 1.5e-6
    beta: float = 1 / 1.5e9
    launch: float = 10e-6
    memory: float = 1 / 550e9
    scattered: float = 16.0


class Kernels(NamedTuple):
    """What a stage does to one layer: kernels started, and how often its bytes pass through memory."""

    launches: float
    passes: float

    def __str__(self) -> str:
        return f"kernels: {self.launches:g}, passes: {self.passes:g}"


# Algorithm 4: U = m U + G; V += U; mask = 1; mask[selected] = 0; V *= mask; U *= mask
MOMENTUM_MASK = Kernels(6, 3 + 3 + 1 + 0 + 3 + 3)
MASK = Kernels(4, 3 + 1 + 0 + 3)  # the same without momentum
PACK = Kernels(2, 0)  # the values; then count, indices and values in one message
CLEAR = Kernels(1, 1)  # G = 0, before messages are added to it


@dataclass(frozen=True)
class Model:
    """A model by the sizes of its parameter tensors, in registration order, and how they are masked."""

    name: str
    sizes: tuple[int, ...]
    mask: Kernels


@dataclass(frozen=True)
class Scheme:
    """A way to exchange, and how many kernels add what came in: a function of layers and ranks."""

    name: str
    collective: Collective
    unpacking: Callable[[int, int], int]


PLAIN = Scheme("RGC", Allgather(), lambda layers, ranks: layers * ranks)
QUANTISED = Scheme("quantised RGC", Allgather(SignMean()), lambda layers, ranks: layers * ranks)
SCHEMES = (
    PLAIN,
    QUANTISED,
    Scheme("RGC, one kernel per message", Allgather(), lambda layers, ranks: ranks),
    # one kernel per message of either phase; then the total, layer by layer
    Scheme("budgeted", Budgeted(), lambda layers, ranks: 2 * ranks + layers),
)


def resnet50(classes: int = 1000) -> Model:
    """Return ResNet-50: 161 tensors, 25,557,032 elements (1,001 classes: 25,559,081)."""
    sizes, channels = [64 * 3 * 7 * 7, 64, 64], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolutions = (width * channels, 9 * width * width, width * 4 * width)
            for size, out in zip(convolutions, (width, width, 4 * width), strict=True):
                sizes += [size, out, out]  # and its batch norm
            if block == 0:
                sizes += [4 * width * channels, 4 * width, 4 * width]
            channels = 4 * width
    return Model("ResNet-50", (*sizes, channels * classes, classes), MOMENTUM_MASK)


def lstm(hidden: int = 1500, vocabulary: int = 10_000) -> Model:
    """Return the 2-layer language model of section 6.2: weights not tied, SGD without momentum."""
    layer, words = 2 * (4 * hidden * hidden,) + 2 * (4 * hidden,), vocabulary * hidden
    return Model("LSTM 2 x 1500", (words, *layer, *layer, words, vocabulary), MASK)


def phases(model: Model, scheme: Scheme, ranks: int, shrink: int = SHRINK) -> dict[str, float]:
    """Return the virtual seconds of every stage of one step, on the mean of the ranks.

    Nothing overlaps.  Layers below 128 KB go dense, in one allreduce; the others of a model in one
    message, the output layer apart and plain where the scheme quantises (section 5.2.3).

    Args:
        model: the layers.
        scheme: what is exchanged, and how.
        ranks: number of virtual ranks.
        shrink: elements of the model per element of the simulation.
    """
    machine, times, method = Machine(), SelectionTimes(), BySize().method
    sizes = [n for n in model.sizes if method(WORD_BYTES * n) != "dense"]
    small = sum(model.sizes) - sum(sizes)
    groups = [(scheme, sizes)]
    if scheme is QUANTISED:
        groups = [(scheme, sizes[:-1]), (PLAIN, sizes[-1:])]

    def select(n: int, exchanging: Scheme) -> float:
        searching = times.search if exchanging is QUANTISED else times.searched
        trimmed = method(WORD_BYTES * n) == "trimmed"
        return (times.trimmed if trimmed else searching).seconds(WORD_BYTES * n)

    def seconds(kernels: Kernels, n: int) -> float:
        return machine.launch * kernels.launches + machine.memory * kernels.passes * WORD_BYTES * n

    async def program(comm: SimCommunicator) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        for exchanging, group in groups:
            with comm.stage("select"):
                await comm.compute(sum(select(n, exchanging) for n in group))
            with comm.stage("mask"):
                await comm.compute(sum(seconds(model.mask, n) for n in group))
            with comm.stage("pack"):
                await comm.compute(sum(seconds(PACK, n) for n in group))
            widths = [-(-n // shrink) for n in group]
            mine = selected(widths, generator)
            with comm.stage("communicate"):  # and what the collective books itself as unpacking
                collective = exchanging.collective.for_layers(widths)
                await collective.reduce(comm, mine, mine.nnz, step=0)
            with comm.stage("unpack"):
                await comm.compute(sum(seconds(CLEAR, n) for n in group))
                await comm.compute(machine.launch * exchanging.unpacking(len(group), ranks))
        with comm.stage("communicate"):
            await comm.allreduce(torch.zeros(small // shrink), "dense")

    links = Links(machine.alpha, machine.beta * shrink, machine.memory * machine.scattered * shrink)
    ledgers = simulate(program, ranks, links=links).ledgers
    return {stage: sum(t.stages[stage] for t in ledgers) / ranks for stage in STAGES}


def selected(widths: Sequence[int], generator: torch.Generator) -> SparseVector:
    """Return k of n entries of every layer, one at a random place in each of k equal stretches."""
    indices, start = [], 0
    for width in widths:
        k = max(1, round(DENSITY * width))
        places = (torch.arange(k) + torch.rand(k, generator=generator)) * (width / k)
        indices.append(start + places.long().clamp(max=width - 1))
        start += width
    chosen = torch.cat(indices)
    return SparseVector(chosen, torch.ones(chosen.numel()), start)


Measured = dict[str, dict[int, dict[str, float]]]  # seconds by scheme, ranks and stage


def table(measured: Measured) -> str:
    """Return milliseconds per stage, and the share of unpack."""
    lines = [f"| | P | {' | '.join(STAGES)} | together | unpack |", "|---|" + "---:|" * 8]
    for scheme, rows in measured.items():
        for ranks, row in list(rows.items())[::2]:
            whole = sum(row.values())
            cells = " | ".join(f"{1e3 * row[stage]:.2f}" for stage in STAGES)
            share = 100 * row["unpack"] / whole
            lines.append(f"| {scheme} | {ranks} | {cells} | {1e3 * whole:.1f} | {share:.0f} % |")
    return "\n".join(lines)


SHADES = ("#bdbdbd", "#969696", "#636363", "#4c9be8", "#d95f02")  # of the stages
WIDTH_INCHES, HEIGHT_INCHES = 10.0, 5.6


def picture(measured: dict[str, Measured], path: Path) -> None:
    """Draw the shares of the two published schemes over P, and the seconds of all at the last P."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots(len(measured), 2, squeeze=False, width_ratios=(1.3, 1))
    for (shares, seconds), (model, schemes) in zip(axes, measured.items(), strict=True):
        for shift, scheme in ((-0.2, PLAIN), (0.2, QUANTISED)):
            for at, row in enumerate(schemes[scheme.name].values()):
                start = 0.0
                for stage, shade in zip(STAGES, SHADES, strict=True):
                    share = 100 * row[stage] / sum(row.values())
                    shares.bar(at + shift, share, 0.36, start, color=shade)
                    start += share
        shares.set(title=f"{model}: left RGC, right quantised", ylabel="share of the step, %")
        shares.set(xlabel="ranks P", ylim=(0, 100), xticks=range(len(RANKS)), xticklabels=RANKS)
        for name, rows in reversed(schemes.items()):
            start = 0.0
            for stage, shade in zip(STAGES, SHADES, strict=True):
                width = 1e3 * rows[RANKS[-1]][stage]
                seconds.barh(name, width, 0.6, start, color=shade, label=stage)
                start += width
            seconds.text(start, name, f" {start:.0f}", va="center", fontsize=8)
        seconds.set(title=f"{model}: at P = {RANKS[-1]}", xlabel="milliseconds per step")
        seconds.margins(x=0.1)
    bars = axes[0][1].containers[: len(STAGES)]
    figure.legend(bars[::-1], STAGES[::-1], fontsize=8, loc="outside right")
    figure.savefig(path, dpi=150)


def report(measured: dict[str, Measured]) -> str:
    """Return the document."""
    last = {model: [rows[RANKS[-1]] for rows in m.values()] for model, m in measured.items()}
    resnet, language = last.values()
    share = [f"{100 * row['unpack'] / sum(row.values()):.0f} %" for row in resnet]
    one, two = ([f"{1e3 * sum(row.values()):.0f}" for row in rows] for rows in (resnet, language))
    machine, times = Machine(), SelectionTimes()
    select = (times.trimmed, times.search, times.searched)
    started = ", ".join(f"{1e6 * t.overhead:.0f}" for t in select)
    passes = ", ".join(f"{t.per_byte / machine.memory:.0f}" for t in select)
    tables = "\n\n".join(f"## {model}\n\n{table(rows)}" for model, rows in measured.items())
    return f"""# RedSync: where a step goes

`python benchmarks/redsync_phases.py`; RedSync's Figure 10 in the simulator's virtual time, density
{100 * DENSITY:g} %, milliseconds per step. The same on every machine.

![shares of the stages over P, and milliseconds at P = {RANKS[-1]}](redsync_phases.png)

At P = {RANKS[-1]} unpacking takes {share[0]} of a step of ResNet-50, {share[1]} where quantised; the
paper measured 69 and 67 %. It adds P messages to every layer one by one, and a kernel takes its time
however little it adds. The LSTM has few layers, all large: there the bytes of P messages are what
costs, and quantised messages pay beyond 16 ranks, as in the paper (they need a search on every step).
`budgeted` applies O(k) entries and avoids both: {one[3]} ms against {one[0]}, and for the LSTM
{two[3]} against {two[0]}. One kernel per message, for all layers at once, mends the unpacking of
the allgather ({one[2]} and {two[2]} ms) but not its bytes.

Real are the collectives, their messages and bytes, and the size policy (dense below 128 KB, trimmed,
search with reuse from 4 MB; quantised: search on every step, the output layer plain). Modelled are
network and GPU, as a node of Piz Daint; a pass reads or writes the bytes of a layer once:

| constant, per layer | value | from |
|---|---|---|
| bandwidth | {1e-9 / machine.beta:g} GB/s | section 6.1, Figure 5 |
| latency | {1e6 * machine.alpha:g} us per message | ours: MPI on Aries |
| a kernel | {1e6 * machine.launch:g} us | ours: started from Python |
| memory | {1e-9 / machine.memory:.0f} GB/s | ours: 3/4 of a P100's 732 GB/s |
| select: trimmed, search, reuse | {started} us; {passes} passes | Algorithms 2, 3 |
| mask: with momentum, without | {MOMENTUM_MASK}; {MASK} | Algorithm 4 |
| pack | {PACK} | Algorithm 4 |
| unpack | {CLEAR}; and a kernel per message | Algorithm 4 |
| unpack, a message | {machine.scattered:g} passes | ours: 4 bytes touch 2 x 32 |

Nothing overlaps, and all layers travel in one message, where the paper sends several: that flatters
the allgather. Layers are {SHRINK} times smaller than real, and bandwidths {SHRINK} times lower. All
times stay as they are but those of headers (up to 7 % of quantised messages) and of `budgeted`'s
slack, which are too long.

{tables}
"""


def main() -> None:
    """Simulate, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    measured = {
        model.name: {
            scheme.name: {ranks: phases(model, scheme, ranks) for ranks in RANKS}
            for scheme in SCHEMES
        }
        for model in (resnet50(), lstm())
    }
    picture(measured, arguments.out.with_suffix(".png"))
    arguments.out.write_text(report(measured), encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
