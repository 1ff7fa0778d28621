"""Settings of ``sparsync linear``, equal for all exchanges and ranks; checked before anything starts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from typer import Option

from sparsync.cli.flags import (
    Lab,
    Timeout,
    numbers,
    option,
    ranks_option,
)
from sparsync.cli.named_algorithms import Named, named
from sparsync.cli.network_choice import Connection
from sparsync.cli.values import (
    Bounds,
    Elements,
    Positive,
    Ranks,
    Rates,
    Readable,
    Seed,
    Steps,
    Warmup,
    check,
    check_fields,
    check_memory,
    make_folder,
)
from sparsync.errors import ConfigurationError, require
from sparsync.presets import PRESETS
from sparsync.published.sparcml.presets import DECIDED, EXCHANGES
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Engine
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.sim import Links

if TYPE_CHECKING:
    from sparsync.published.sparcml.linear.problem import Problem
    from sparsync.published.sparcml.linear.solvers import Solver

__all__ = ["TRIGRAMS", "LinearSettings"]

TRIGRAMS = "trigrams"
Columns = Annotated[int, Bounds(1, 2**31 - 1)]  # SciPy's indices have 32 bits
Threads = Annotated[int, Bounds(1, 1024)]
Staleness = Annotated[int, Bounds(0, 1000)]  # each step in flight holds a gradient
_DATA = f"An svmlight file (also .gz, .bz2), or {TRIGRAMS}: those of Python's own library."
_TRANSPORT = (
    "For real ranks: torch (gloo), zmq, mpi (by mpiexec), or auto: the library's default.  sim: "
    "virtual "
    "ranks and clock, in this process."
)
_SAVE = "Write the trained model to this file (.npz), for --predict."
_POSITIVE = "Class +1: labels in the file, separated by commas; or a package of the trigrams."


@dataclass(frozen=True)
class LinearSettings:
    """Settings that all exchanges of a comparison share; fields with a help text are options."""

    data: Annotated[str, Readable(), option(_DATA)] = TRIGRAMS
    model: Annotated[str, option("logistic or svm.")] = "logistic"
    solver: Annotated[str, option("sgd, or scd: block coordinate descent (logistic only).")] = "sgd"
    # the exchanges to repeat the training with: names, possibly with options
    exchanges: tuple[str, ...] = ("split-allgather",)
    ranks: Annotated[Ranks, ranks_option(4)] = 4
    transport: Annotated[str, option(_TRANSPORT)] = "auto"
    links: Links = field(default_factory=Links)  # links of the simulated network
    lab: Lab = None
    epochs: Annotated[Steps, option("Passes over the rows; with scd over the coordinates.")] = 5
    steps: Annotated[Steps | None, option("Largest number of steps per epoch.", "a whole pass")] = (
        None
    )
    batch_size: Annotated[
        Elements | None,
        Option(
            "--batch",
            help="Rows per rank and step of sgd.",
            show_default="1,000, or fewer for 100 steps an epoch",
        ),
    ] = None
    coordinates: Annotated[Elements, option("Per rank and step of scd.")] = 100
    lr: Annotated[
        Positive | None, option("First learning rate of sgd.", "by the length of the rows")
    ] = None
    schedule: Annotated[
        str,
        option(
            "Schedule of the rate: adagrad, one per weight; constant, 1/t, 1/sqrt(t), step; t in "
            "epochs."
        ),
    ] = "adagrad"
    l1: Annotated[Rates, option("L1 penalty; makes weights exactly zero.")] = 0.0
    l2: Annotated[Rates, option("L2 penalty.")] = 0.0
    staleness: Staleness = 0  # number of steps by which gradients are applied late; 0: synchronous
    threads: Annotated[Threads, option("Per rank.")] = 1
    dimensions: Annotated[
        Columns | None, option("Columns.", "the file's; 3,231,961 for trigrams")
    ] = None
    rows: Annotated[Elements | None, option("Number of trigram samples.", "all")] = None
    positive: Annotated[
        str | None, option(_POSITIVE, "the larger of two labels; the largest package")
    ] = None
    cache: Annotated[
        Path | None,
        Readable(folder=True),
        option("Folder for the parsed data.", "next to the file"),
    ] = None
    held_out_every: Annotated[
        Warmup, option("One of this many rows is held out to measure accuracy; 0: none.")
    ] = 10
    seed: Annotated[Seed, option("Seed for the order of rows or coordinates.")] = 0
    save: Annotated[Path | None, option(_SAVE)] = None
    timeout: Timeout = 300.0

    def __post_init__(self) -> None:
        if importlib.util.find_spec("scipy") is None:
            raise ConfigurationError("sparsync linear needs SciPy: pip install 'sparsync[linear]'")
        check_fields(self)
        check("held_out_every", 1, self.held_out_every != 1, "0 or at least 2, to leave some rows")
        self._check_solver()
        self._check_data()
        self.connection()

    def _check_solver(self) -> None:
        check("solver", self.solver, self.solver in ("sgd", "scd"), "sgd or scd")
        ignored = {"sgd": ("coordinates",), "scd": ("batch_size", "lr", "schedule")}[self.solver]
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ignored and value != one.default:
                raise ConfigurationError(
                    f"{one.name} is {value}, which {self.solver} does not have; leave it out"
                )
        columns = self.dimensions or 0
        check_memory(
            f"weights and a gradient of {columns:,} columns on {self.ranks} ranks",
            2 * 8 * columns * self.ranks,
            "give fewer --dimensions or --ranks",
        )
        if self.solver == "scd" and self.staleness:
            raise ConfigurationError(
                "scd is synchronous: its step size is safe only for one step's coordinates; "
                "choose sgd, or --aggregation sync"
            )
        # imported here because neither the help nor other commands need SciPy
        from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]

        from sparsync.published.sparcml.linear.problem import Problem

        nothing = Problem(csr_matrix((0, 1)), np.zeros(0), self.model, self.l1, self.l2)
        for name in self.exchanges:  # a solver refuses settings that it cannot handle
            self.make_solver(SoloCommunicator(), nothing, name)

    def make_solver(
        self,
        comm: Communicator,
        problem: Problem,
        exchange: str,
        background: Engine | None = None,
        **shared: Any,
    ) -> Solver:
        """Make the solver for a rank's rows; ``shared`` contains further options of ``Solver``."""
        from sparsync.published.sparcml.linear.solvers import SOLVERS

        found = self.named(exchange)
        own: dict[str, Any] = {"coordinates": self.coordinates}
        if self.solver == "sgd":
            own = {"batch_size": self.batch_size, "lr": self.lr, "schedule": self.schedule}
            own |= {"staleness": self.staleness, "background": background}
        own |= {"seed": self.seed, "steps": self.steps}
        return SOLVERS[self.solver](
            comm, problem, found.name, options=found.options, **own, **shared
        )

    @staticmethod
    def named(exchange: str) -> Named:
        """Parse the name of an exchange, which may be followed by options."""
        return named(exchange, PRESETS, among=EXCHANGES, decided=DECIDED, kind="exchange")

    def _check_data(self) -> None:
        if self.data == TRIGRAMS:
            require(self.cache is None, f"cache is for a file; leave it out with --data {TRIGRAMS}")
            return
        if self.cache is not None:
            make_folder(self.cache, "--cache")
        if not Path(self.data).is_file():
            raise ConfigurationError(
                f"--data '{self.data}' is not a file; name an svmlight file, or {TRIGRAMS}"
            )
        if self.rows is not None:
            raise ConfigurationError(f"rows is for --data {TRIGRAMS}; a file has its own")
        self.positive_labels()

    def connection(self) -> Connection:
        """Return how the ranks are connected."""
        return Connection(self.transport, self.timeout, None, self.lab, simulates=True)

    def positive_labels(self) -> list[float] | None:
        """Return the labels that ``positive`` lists, as numbers; None if it is not given."""
        return None if self.positive is None else [*numbers("positive", self.positive, float)]
