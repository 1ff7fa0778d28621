"""What one ``sparsync linear`` trains, checked before anything starts."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sparsync.bench.connection import TRANSPORTS, Connection
from sparsync.bench.shaped import check_rate
from sparsync.errors import ConfigurationError
from sparsync.transports.base import check_timeout
from sparsync.transports.sim import Links

__all__ = ["DENSE", "TRIGRAMS", "LinearSettings", "check_installed"]

DENSE = "dense"
TRIGRAMS = "trigrams"


def check_installed() -> None:
    """Refuse to go on without SciPy, which the rest of the package does without.

    Raises:
        ConfigurationError: says what to install.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ConfigurationError("sparsync linear needs SciPy: pip install 'sparsync[linear]'")


@dataclass(frozen=True)
class LinearSettings:
    """What is equal for all exchanges of a comparison, and on all ranks.

    Attributes:
        data: an svmlight file, or "trigrams".
        model: "logistic" or "svm".
        solver: "sgd" or "scd".
        exchanges: by which the same training is repeated; names of ``linear.exchanges.EXCHANGES``.
        ranks: world size P.
        transport: "sim" (virtual ranks and clock), "torch" (gloo), "zmq", "mpi" or "auto", the
            library's default.  None: "sim", in the lab "auto".
        links: the simulated network.
        lab: rate of a real, shaped network on this machine, as "1gbit".
        epochs: passes over the rows (sgd) or the coordinates (scd).
        steps: most steps of an epoch; None: a whole pass.
        batch_size: rows per rank and step of sgd (SparCML, section 8.2: 1,000).
        coordinates: per rank and step of scd (there: 100).
        lr: first learning rate of sgd; None: ``suggested_lr``.
        schedule: of the learning rate.
        l1: penalty.
        l2: penalty.
        staleness: steps by which a gradient is applied late; 0: synchronous.
        threads: per rank.
        dimensions: columns; None: the file's, or those of the URL data set for the trigrams.
        rows: so many trigram samples; None: all.
        positive: the label of +1: of a file numbers, with commas; of the trigrams a package.
        cache: folder for the parsed file.
        held_out_every: of so many rows one is held out, to measure accuracy on; 0: none, accuracy
            is on the rows of the training.
        seed: of the order of rows or coordinates.
        timeout: seconds that any rank waits for another.
    """

    data: str = TRIGRAMS
    model: str = "logistic"
    solver: str = "sgd"
    exchanges: tuple[str, ...] = ("split-allgather",)
    ranks: int = 4
    transport: str | None = None
    links: Links = field(default_factory=Links)
    lab: str | None = None
    epochs: int = 5
    steps: int | None = None
    batch_size: int = 1000
    coordinates: int = 100
    lr: float | None = None
    schedule: str = "constant"
    l1: float = 0.0
    l2: float = 0.0
    staleness: int = 0
    threads: int = 1
    dimensions: int | None = None
    rows: int | None = None
    positive: str | None = None
    cache: Path | None = None
    held_out_every: int = 10
    seed: int = 0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        check_installed()
        for name in ("ranks", "epochs", "steps", "batch_size", "coordinates", "threads", "rows"):
            _at_least(1, name, getattr(self, name))
        for name in ("staleness", "seed", "held_out_every"):
            _at_least(0, name, getattr(self, name))
        _at_least(1, "dimensions", self.dimensions)
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ConfigurationError(f"lr is {self.lr}; give a number > 0")
        if self.held_out_every == 1:
            raise ConfigurationError(
                "held_out_every is 1, which leaves no row; give 0 or at least 2"
            )
        self._check_solver()
        self._check_data()
        self._check_transport()

    def _check_solver(self) -> None:
        # SciPy is not loaded for the help, nor for the other commands
        from sparsync.linear.exchanges import gradient_exchange
        from sparsync.linear.losses import Penalty, loss_named
        from sparsync.linear.schedules import Schedule

        for name in self.exchanges:
            gradient_exchange(name, np.dtype(np.float32))
        loss_named(self.model), Penalty(self.l1, self.l2), Schedule(self.schedule)
        if self.solver not in ("sgd", "scd"):
            raise ConfigurationError(f"unknown solver {self.solver!r}; choose sgd or scd")
        if self.solver == "scd" and self.model != "logistic":
            raise ConfigurationError(f"scd needs a smooth loss, not {self.model}; choose logistic")
        if self.solver == "scd" and self.staleness:
            raise ConfigurationError(
                "scd is synchronous: its step size is safe for one step's coordinates alone; "
                "choose sgd, or --aggregation sync"
            )

    def _check_data(self) -> None:
        if self.data != TRIGRAMS:
            if not Path(self.data).is_file():
                raise ConfigurationError(
                    f"--data '{self.data}' is no file; name an svmlight file, or {TRIGRAMS}"
                )
            if self.rows is not None:
                raise ConfigurationError(f"rows goes with --data {TRIGRAMS}; a file has its own")
            self.positive_labels()

    def _check_transport(self) -> None:
        check_timeout(self.timeout)
        if self.lab is not None:
            check_rate(self.lab)
        if self.simulated:
            if self.lab is not None:
                raise ConfigurationError(
                    "--lab needs real ranks, --transport sim has none; "
                    f"choose --transport {', '.join(TRANSPORTS)}"
                )
        elif self.carrier not in TRANSPORTS:
            raise ConfigurationError(
                f"unknown transport {self.transport!r}; choose one of sim, {', '.join(TRANSPORTS)}"
            )
        else:
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
        return Connection(self.carrier, self.timeout)

    def positive_labels(self) -> list[float] | None:
        """Read ``positive`` as the labels of a file."""
        if self.positive is None:
            return None
        try:
            return [float(label) for label in self.positive.split(",")]
        except ValueError as error:
            raise ConfigurationError(
                f"positive is {self.positive!r}; give the labels of +1 in the file, with commas"
            ) from error


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ConfigurationError(f"{name} is {value}; give at least {least}")
