"""Settings of ``sparsync simulate``, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from sparsync.algorithm import Algorithm, check_density
from sparsync.averaging.averager import Averager
from sparsync.averaging.schemes import SCHEMES
from sparsync.cli.bench.inputs import INPUTS
from sparsync.cli.flags import option
from sparsync.cli.named_algorithms import algorithm_of, named
from sparsync.cli.values import (
    Bounds,
    Elements,
    Factor,
    Ranks,
    Readable,
    Seconds,
    Seed,
    Steps,
    Warmup,
    check,
    check_fields,
)
from sparsync.cost.machine import Machine
from sparsync.errors import require
from sparsync.presets import PRESETS, resolve
from sparsync.selection import Everything
from sparsync.transports.sim import Links, Topology

__all__ = ["SPREAD", "Contender", "Scheme", "SimulationSettings"]

SPREAD = "spread"  # the sparse input: a rank holds only 2 k elements, however large n is
Buckets = Annotated[int, Bounds(1, 1000)]  # each bucket costs a separate exchange
_BUCKET_ELEMENTS = 25 * 2**20 // 4  # DDP's default buckets have 25 MiB


@dataclass(frozen=True)
class Contender:
    """One row: an algorithm, and how its exchange is divided."""

    name: str
    algorithm: Algorithm
    buckets: int = 1  # number of units that are selected and exchanged together
    overlap: bool = False  # exchange buckets during the backward pass

    @property
    def selects(self) -> bool:
        """Whether entries are selected; otherwise all elements are exchanged."""
        return not isinstance(self.algorithm.make_selector(), Everything)


@dataclass(frozen=True)
class Scheme:
    """One row: an averaging scheme for models that are trained separately."""

    name: str
    make: Callable[[], Averager]  # makes the averager of one rank


@dataclass(frozen=True)
class SimulationSettings:
    """Training steps of some algorithms on virtual ranks; fields with a help text are options."""

    # presets, and averaging schemes by name
    algorithms: tuple[str | Algorithm, ...] = ("oktopk", "budgeted")
    ranks: Ranks = 32  # world size
    model_size: Elements = 133_547_324  # number of elements n; BERT's (Ok-Topk, Table 2)
    density: Annotated[float, option("k / n in (0, 1].")] = 0.01
    links: Topology = field(default_factory=lambda: Links(alpha=20e-6, beta=0.8e-9))
    compute: Seconds = 0.0  # seconds of a rank's forward and backward pass
    spread: Seconds = 0.0  # standard deviation of ``compute`` over ranks and steps, in seconds
    stragglers: tuple[tuple[int, float], ...] = ()  # (rank, factor by which it computes slower)
    overlap: Annotated[
        bool, Option("--overlap", help="Exchange buckets during the backward pass.")
    ] = False
    buckets: Annotated[Buckets | None, option("Of equal size.", "1; with --overlap of 25 MiB")] = (
        None
    )
    # the costs of selecting, packing, unpacking and summing; alpha and beta come from ``links``
    machine: Machine = field(default_factory=Machine)
    scale: Annotated[
        Factor | None, option("C: n / C and k / C stand for n and k.", "as small as 2 GB allow")
    ] = None
    steps: Annotated[Steps, option("Reported steps.")] = 2
    warmup: Annotated[
        Warmup, option("Steps before the reported ones: exact ones, which cut the regions.")
    ] = 1
    inputs: Annotated[
        str,
        Readable(),
        option(
            f"{SPREAD}: sparse, in cells; {', '.join(INPUTS)}: all elements, which takes memory; "
            "or a file of gradients [rows, n], .npy or torch.save's."
        ),
    ] = SPREAD
    # the fill-in in Ok-Topk, section 5.2, implies 0.12 for VGG-16 and 0.36 for LSTM
    shared: Annotated[
        float, option(f"Share of the entries that lie at the same places on all ranks ({SPREAD}).")
    ] = 0.25
    baselines: bool = True  # add "Dense" and "DenseOvlp"
    seed: Annotated[Seed, option("Seed of gradients and computation times.")] = 0
    memory: float = 2e9  # approximate bytes that all virtual ranks together may occupy

    def __post_init__(self) -> None:
        # refuse unknown names and invalid options
        for one in self.contenders():
            if isinstance(one, Scheme):
                one.make()
        check_fields(self)
        check_density(self.density)
        good = self.scale is None or 1 <= self.scale <= self.model_size
        expected = f"a factor from 1 to the model's {self.model_size} elements"
        check("scale", self.scale, good, expected)
        check("shared", self.shared, 0 <= self.shared <= 1, "a fraction of the entries, in [0, 1]")
        good = self.inputs in (SPREAD, *INPUTS) or Path(self.inputs).is_file()
        expected = f"a file of recorded gradients, or one of {SPREAD}, {', '.join(INPUTS)}"
        check("inputs", repr(self.inputs), good, expected)
        for rank, factor in self.stragglers:
            good = 0 <= rank < self.ranks and 1 <= factor < math.inf
            expected = f"RANK:FACTOR with a rank in [0, {self.ranks}) and a factor >= 1"
            check("straggler", f"{rank}:{factor:g}", good, expected)
        require(
            not self.stragglers or self.compute + self.spread > 0,
            "--straggler slows computation, which takes 0 s; add --compute SEC, or omit it",
        )
        require(
            self.inputs == SPREAD or self.shared == SimulationSettings.shared,
            f"--shared is only for --inputs {SPREAD}, not {self.inputs!r}; omit one of them",
        )

    def contenders(self) -> list[Contender | Scheme]:
        """Return one row per algorithm, the baselines first."""
        ddp = max(math.ceil(self.model_size / _BUCKET_ELEMENTS), 1)
        own = self.buckets or (ddp if self.overlap else 1)
        rows: list[Contender | Scheme] = []
        if self.baselines:
            rows = [
                Contender("Dense", resolve("dense")),
                Contender("DenseOvlp", resolve("dense"), ddp, overlap=True),
            ]
        for given in self.algorithms:
            if isinstance(given, Algorithm):
                rows.append(Contender(given.name, given, own, self.overlap))
                continue
            found = named(given, PRESETS, SCHEMES)
            if found.name not in PRESETS:
                rows.append(Scheme(found.label, partial(SCHEMES[found.name], **found.options)))
                continue
            twice = found.label == "dense" and (own, self.overlap) in ((1, False), (ddp, True))
            if not (self.baselines and twice):  # "Dense" or "DenseOvlp" is the same row
                rows.append(Contender(found.label, algorithm_of(given), own, self.overlap))
        return rows
