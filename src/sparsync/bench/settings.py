"""What one ``sparsync bench`` measures, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from sparsync.bench.cases import Case
from sparsync.bench.connection import TRANSPORTS, Connection
from sparsync.bench.inputs import input_named
from sparsync.bench.plan import Pace, Verify, check_verify
from sparsync.bench.shaped import check_rate
from sparsync.errors import ConfigurationError
from sparsync.presets import check_density, resolve
from sparsync.transports.base import check_timeout
from sparsync.transports.sim import Links

__all__ = ["BenchSettings"]

_SIMULATED_STEPS = 20  # the virtual clock repeats itself: a short run says as much
_SIMULATED_WARMUP = 5
_LAB_TRANSPORTS = tuple(name for name in TRANSPORTS if name != "mpi")


@dataclass(frozen=True)
class BenchSettings:
    """What is measured: every collective at every size and density.

    Attributes:
        collectives: names of presets.
        ranks: world size P.
        sizes: numbers of elements n.
        densities: k / n asked for.
        steps: timed steps; None: 20, or by the row's speed where the clock is real (``Pace``).
        warmup: steps before them; their volume and correctness count, their time does not.  None:
            5, or fewer where steps are slow.
        input: kind of gradient; "uniform" has the least overlap, hence the most fill-in.
        seed: of the gradients.
        transport: "sim" (virtual clock: communication alone); "torch" (gloo), "zmq", "mpi" or "auto",
            the library's default (wall clock: everything).  None: "sim", in the lab "auto".
        links: the simulated network.
        timeout: seconds that a process waits for another.
        lab: rate of a real, shaped network on this machine, as "1gbit".
        curve_keys: folder of keys, for zmq.
        verify: which steps are verified in full; see ``verified_in_full``.
    """

    collectives: tuple[str, ...] = ("dense", "allgather", "oktopk")
    ranks: int = 8
    sizes: tuple[int, ...] = (1_000_000,)
    densities: tuple[float, ...] = (0.01,)
    steps: int | None = None
    warmup: int | None = None
    input: str = "uniform"
    seed: int = 0
    transport: str | None = None
    links: Links = field(default_factory=Links)
    timeout: float = 300.0
    lab: str | None = None
    curve_keys: Path | None = None
    verify: Verify = "auto"

    def __post_init__(self) -> None:
        for name in self.collectives:
            resolve(name)
        for name, least in (("ranks", 1), ("steps", 1), ("warmup", 0)):
            _at_least(least, name, getattr(self, name))
        for size in self.sizes:
            _at_least(1, "size", size)
        for density in self.densities:
            check_density(density)
        input_named(self.input)
        check_verify(self.verify)
        check_timeout(self.timeout)
        if self.lab is not None:
            check_rate(self.lab)
        if self.carrier not in ("sim", *TRANSPORTS):
            raise ConfigurationError(
                f"unknown transport {self.transport!r}; choose one of sim, {', '.join(TRANSPORTS)}"
            )
        if self.simulated and (self.lab or self.curve_keys):
            option = "--lab" if self.lab else "--curve-keys"
            raise ConfigurationError(
                f"{option} needs real ranks, --transport sim has none; "
                f"choose --transport {', '.join(TRANSPORTS)}"
            )
        if self.lab is not None and self.carrier == "mpi":
            raise ConfigurationError(
                "--lab and --transport mpi do not go together: MPI's ranks of one machine share "
                f"memory and pass the links by; choose --transport {', '.join(_LAB_TRANSPORTS)}"
            )
        if not self.simulated:
            self.connection()

    @property
    def carrier(self) -> str:
        """The transport, the default filled in."""
        if self.transport is not None:
            return self.transport
        return "sim" if self.lab is None else "auto"

    @property
    def simulated(self) -> bool:
        """The ranks and the clock are virtual."""
        return self.carrier == "sim"

    def connection(self) -> Connection:
        """How real ranks are connected."""
        return Connection(self.carrier, self.timeout, self.curve_keys)

    def pace(self) -> Pace:
        """How many steps a row takes."""
        if not self.simulated:
            return Pace(self.steps, self.warmup)
        return Pace(
            _SIMULATED_STEPS if self.steps is None else self.steps,
            _SIMULATED_WARMUP if self.warmup is None else self.warmup,
        )

    def cases(self) -> list[Case]:
        """Return one case per row, collectives side by side."""
        return [
            Case(name, self.ranks, size, density, self.input, self.seed, self.links)
            for size in self.sizes
            for density in self.densities
            for name in self.collectives
        ]


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ConfigurationError(f"{name} is {value}; give at least {least}")
