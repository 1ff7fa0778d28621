"""What one ``sparsync simulate`` simulates, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from sparsync.bench.inputs import INPUTS
from sparsync.errors import ConfigurationError
from sparsync.planning.machine import Machine
from sparsync.presets import Algorithm, check_density, dense, resolve
from sparsync.selection import Everything
from sparsync.transports.sim import Links, Topology

__all__ = ["SPREAD", "Contender", "SimulationSettings"]

SPREAD = "spread"  # the sparse input: its ranks hold 2 k elements each, whatever n is
_BUCKET_ELEMENTS = 25 * 2**20 // 4  # DDP's default buckets have 25 MiB


@dataclass(frozen=True)
class Contender:
    """One row: an algorithm, and how its exchange is divided.

    Attributes:
        name: for tables.
        algorithm: what runs.
        buckets: units that are selected and exchanged together.
        overlap: buckets are exchanged while the backward pass goes on.
    """

    name: str
    algorithm: Algorithm
    buckets: int = 1
    overlap: bool = False

    @property
    def selects(self) -> bool:
        """Entries are selected; else all elements are exchanged."""
        return not isinstance(self.algorithm.make_selector(), Everything)


@dataclass(frozen=True)
class SimulationSettings:
    """A training step of some algorithms on virtual ranks.

    Attributes:
        algorithms: names of presets, or algorithms.
        ranks: world size P.
        model_size: number of elements n; the default is BERT's (Ok-Topk, Table 2).
        density: k / n.
        links: the network.
        compute: seconds of a rank's forward and backward pass.
        spread: its standard deviation over ranks and steps, in seconds.
        stragglers: ranks, and by which factor their computation is slower.
        overlap: the algorithms exchange buckets while the backward pass goes on.
        buckets: of the algorithms, of equal size; None: 1, with ``overlap`` of 25 MiB.
        machine: what selecting, packing, unpacking and summing cost; its alpha and beta are not used.
        scale: C: n / C and k / C stand for n and k; None: as small as ``memory`` allows.
        steps: that are reported.
        warmup: steps before them: those that open periods, and are exact.
        inputs: "spread", a name of ``sparsync.bench.inputs``, or a file of gradients.
        shared: part of a rank's entries that lie at the same places on all ranks ("spread" only;
            the fill-in of Ok-Topk, section 5.2, implies 0.12 for VGG-16 and 0.36 for LSTM).
        baselines: add "Dense" and "DenseOvlp".
        seed: of the gradients and of the computation times.
        memory: bytes that the virtual ranks may take together, about.
    """

    algorithms: tuple[str | Algorithm, ...] = ("oktopk", "budgeted")
    ranks: int = 32
    model_size: int = 133_547_324
    density: float = 0.01
    links: Topology = field(default_factory=lambda: Links(alpha=20e-6, beta=0.8e-9))
    compute: float = 0.0
    spread: float = 0.0
    stragglers: tuple[tuple[int, float], ...] = ()
    overlap: bool = False
    buckets: int | None = None
    machine: Machine = field(default_factory=Machine)
    scale: float | None = None
    steps: int = 2
    warmup: int = 1
    inputs: str = SPREAD
    shared: float = 0.25
    baselines: bool = True
    seed: int = 0
    memory: float = 2e9

    def __post_init__(self) -> None:
        for name in self.algorithms:
            resolve(name)
        for name, least in (
            ("ranks", 1),
            ("model_size", 1),
            ("steps", 1),
            ("warmup", 0),
            ("buckets", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}; give at least {least}")
        for name in ("compute", "spread"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} is {value}; give seconds >= 0")
        check_density(self.density)
        if self.scale is not None and not 1 <= self.scale <= self.model_size:
            raise ConfigurationError(
                f"scale is {self.scale}; give a factor from 1 to the model's {self.model_size} elements"
            )
        if not 0 <= self.shared <= 1:
            raise ConfigurationError(
                f"shared is {self.shared}; give a part of the entries, in [0, 1]"
            )
        if self.inputs not in (SPREAD, *INPUTS) and not Path(self.inputs).is_file():
            raise ConfigurationError(
                f"inputs {self.inputs!r} is neither a file nor one of {SPREAD}, {', '.join(INPUTS)}; "
                "give a file of recorded gradients, or one of these"
            )
        for rank, factor in self.stragglers:
            if not (0 <= rank < self.ranks and 1 <= factor < math.inf):
                raise ConfigurationError(
                    f"straggler {rank}:{factor:g}; give RANK:FACTOR with a rank in [0, {self.ranks}) "
                    "and a factor >= 1"
                )

    def contenders(self) -> list[Contender]:
        """Return one row per algorithm, the baselines first."""
        ddp = max(math.ceil(self.model_size / _BUCKET_ELEMENTS), 1)
        own = self.buckets or (ddp if self.overlap else 1)
        rows = []
        if self.baselines:
            rows = [Contender("Dense", dense()), Contender("DenseOvlp", dense(), ddp, overlap=True)]
        for given in self.algorithms:
            algorithm = resolve(given)
            rows.append(Contender(algorithm.name, algorithm, own, self.overlap))
        return rows
