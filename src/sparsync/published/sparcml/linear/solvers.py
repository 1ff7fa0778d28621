"""SGD and block coordinate descent on several ranks, with messages as sparse as the data."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import torch
from scipy.sparse import csc_matrix, hstack  # type: ignore[import-untyped, unused-ignore]

from sparsync.algorithm import settings_of
from sparsync.collectives import Collective, Dense, Reduced
from sparsync.errors import require
from sparsync.presets import PRESETS, resolve
from sparsync.published.sparcml.linear.problem import (
    AdaptiveWeights,
    Floats,
    Integers,
    Problem,
    Products,
    Weights,
    soft,
)
from sparsync.published.sparcml.presets import DECIDED, EXCHANGES
from sparsync.sparse import DenseVector, SparseVector, Vector, even_boundaries
from sparsync.tables import unknown
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Engine
from sparsync.transports.ledger import Raw
from sparsync.wire.codec import Codec
from sparsync.wire.coo import Coo, StreamCodec
from sparsync.wire.packed import Packed

__all__ = [
    "SCHEDULES",
    "SOLVERS",
    "DenseSlices",
    "Evaluation",
    "Meter",
    "Scd",
    "Sgd",
    "Solver",
]


# ---- exchanges --------------------------------------------------------------------------------------


@final
class DenseSlices(Collective):
    """Collects every rank's slice of a vector in dense form; the baseline for ``Scd``.

    ``even_boundaries`` defines the slices.

    Cost: ceil(log2 P) messages; n (P - 1) / P words received.   State: none.
    Differs from the paper: nothing.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.eye(3)[comm.rank])
        ...     return (await DenseSlices().reduce(comm, mine, k=1, step=0)).total.values.tolist()
        >>> simulate(program, world_size=3).results[1]
        [1.0, 1.0, 1.0]

    References: Renggli et al., SparCML, SC 2019, section 8.2 ("dense counterpart" of its allgather).
    """

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Collect the slices and concatenate them."""
        cuts = even_boundaries(selected.size, comm.world_size)
        lengths = [stop - start for start, stop in pairwise(cuts)]
        dense = selected.to_dense()
        mine = dense.new_zeros(max(lengths))  # equal lengths need not be announced
        mine[: lengths[comm.rank]] = dense[cuts[comm.rank] : cuts[comm.rank + 1]]
        slices = await comm.allgather(mine, "allgather")
        parts = [part[:length] for part, length in zip(slices, lengths, strict=True)]
        return Reduced(DenseVector(torch.cat(parts)), selected)


# ---- shared by the solvers --------------------------------------------------------------------------

# divisors of the learning rate after t epochs, counted from 0; "adagrad" has one rate per weight instead
SCHEDULES: MappingProxyType[str, Callable[[float], float]] = MappingProxyType(
    {
        "adagrad": lambda t: 1.0,
        "constant": lambda t: 1.0,
        "1/t": lambda t: 1 + t,
        "1/sqrt(t)": lambda t: math.sqrt(1 + t),
        "step": lambda t: 2.0 ** math.floor(t),
    }
)


@final
class Meter:
    """Measures how a rank spends its time, in lists of times.

    All ranks exchange in the same order, so the i-th entries of their lists belong to the same exchange.

    Args:
        fence: called before every exchange; it waits for the slowest rank, so that waiting does not
            count as communication, and returns the start time.  By default, ranks do not wait.
        clock: the clock for exchanges, e.g. the simulator's.
    """

    def __init__(
        self,
        fence: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.fence, self.clock = fence or clock, clock
        self.clear()

    def clear(self) -> None:
        """Start new lists; callers may keep references to the old ones."""
        self.computed: list[float] = []  # seconds of every interval of computation
        self.exchanged: list[tuple[str, float, float]] = []  # phase, start and end

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time an interval of computation that does not await anything."""
        start = time.perf_counter()
        yield
        self.computed.append(time.perf_counter() - start)

    @contextmanager
    def exchanging(self, phase: str) -> Iterator[None]:
        """Time an exchange from the moment at which all ranks have arrived."""
        start = self.fence()
        yield
        self.exchanged.append((phase, start, self.clock()))


@dataclass(frozen=True)
class Evaluation:
    """A model's quality on all ranks' rows; NaN if there are no rows."""

    objective: float  # mean loss plus penalties
    accuracy: float  # fraction of rows with the right sign (a score of 0 counts as +1)


# the names of all solvers' facts
_FACTS = ("options of the exchange", "batch_size", "staleness", "schedule", "coordinates", "seed")


class Solver(ABC):
    """Trains a linear model on all ranks' rows; all ranks must call the same methods.

    Args:
        comm: the group.
        problem: this rank's rows; dimensions, model and penalties must be equal on all ranks.
        exchange: one of ``sparsync.published.sparcml.presets.EXCHANGES``, in any spelling.
        options: options of the exchange; the solver sets its format and cap.
        products: the threads for matrix products.
        seed: seed for the order of rows or coordinates.
        steps: largest number of steps per epoch; with None, an epoch is a whole pass.
        meter: measures the time.
    """

    facts: dict[str, object]  # some of ``_FACTS``; must be equal on all ranks

    def __init__(
        self,
        comm: Communicator,
        problem: Problem,
        exchange: str,
        *,
        options: Mapping[str, Any] = MappingProxyType({}),
        products: Products | None = None,
        seed: int = 0,
        steps: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        name = PRESETS.name_of(exchange) if exchange in PRESETS else exchange
        if name not in EXCHANGES:
            raise unknown("exchange", exchange, EXCHANGES)
        self.comm, self.problem, self.exchange = comm, problem, name
        refused = sorted({*options} & {*DECIDED})
        require(
            not refused,
            f"{name}: {', '.join(refused)} cannot be given, because the solver sends exact sums; omit it",
        )
        self.options = {**options}
        self.products, self.meter = products or Products(), meter or Meter()
        self.seed, self.steps = seed, steps
        self.weights: Weights = problem.weights()  # the same bits on all ranks
        self.rows = [problem.rows]  # after ``start``, every rank's number of rows
        self.step = 0

    async def start(self, epochs: int | None = None) -> None:
        """Check that all ranks agree on the problem, and count their rows; call this once, first.

        Args:
            epochs: number of epochs that will follow, if known; must be equal on all ranks.

        Raises:
            PeerError: ranks disagree; the message names the fact and the ranks.
        """
        own = self.problem
        facts = {"dimensions": own.dimensions, "dtype": own.dtype, "model": own.model}
        facts |= {"penalty": (own.l1, own.l2), "intercept": own.intercept, "steps": self.steps}
        facts |= {
            "solver": type(self).__name__.lower(),
            "exchange": self.exchange,
            "epochs": epochs,
        }
        # all solvers compare facts with the same names, because ranks may have different solvers
        await agree(self.comm, {**facts, **dict.fromkeys(_FACTS), **self.facts})
        counts = await self.comm.allgather(torch.tensor([own.rows], device="cpu"), "rows")
        self.rows = [int(count) for count in counts]

    @property
    def epoch_steps(self) -> int:
        """The number of steps per epoch, equal on all ranks; known after ``start``."""
        whole = self._whole_pass()
        return whole if self.steps is None else min(whole, self.steps)

    @abstractmethod
    async def epoch(self, epoch: int, advance: Callable[[int], None] = lambda steps: None) -> None:
        """Run a 0-based epoch; after every step, call ``advance`` with the epoch's number of steps."""

    @abstractmethod
    def _whole_pass(self) -> int:
        """Return the number of steps that use every row or coordinate once."""

    def _collective(self, dense: Callable[[], Collective], cap: float | None) -> Collective:
        """Return the exchange's collective, with this cap and the shortest exact format."""
        if self.exchange == "dense":
            return dense()
        exact: Codec[SparseVector] = Packed("fp32") if self.problem.dtype == np.float32 else Coo()
        codec = exact if self.exchange == "allgather" else StreamCodec(exact)
        given = {**self.options, "codec": codec, "cap": cap}
        return resolve(self.exchange, **given).make_collective()

    async def evaluate(self, problem: Problem | None = None) -> Evaluation:
        """Evaluate the weights on all ranks' rows of a problem, by default the training problem.

        Cost: one pass over the rows and an allgather of 24 bytes.
        """
        problem = problem or self.problem
        scores = self.products.scores(problem.features, self.weights)
        margins = (scores * problem.labels).astype(np.float64)
        right = (scores >= 0) == (problem.labels > 0)
        mine = [problem.loss.value(margins).sum(), right.sum(), problem.rows]
        loss, correct, rows = await _sum_over_ranks(self.comm, mine, "evaluation")
        if rows == 0:
            return Evaluation(np.nan, np.nan)
        penalty = problem.penalty(self.weights.to_dense())
        return Evaluation(loss / rows + penalty, correct / rows)


async def _sum_over_ranks(comm: Communicator, mine: list[float], phase: str) -> list[float]:
    """Return sums of a few numbers, in rank order, so that all ranks and transports get the same bits."""
    everyone = await comm.allgather(torch.tensor(mine, dtype=torch.float64, device="cpu"), phase)
    return torch.stack(everyone).cumsum(0)[-1].tolist()


# ---- SGD --------------------------------------------------------------------------------------------


_BATCH = 1_000  # rows per rank and step (section 8.2)
# smallest number of steps per epoch; the paper's batches would give fewer, because the trigrams have only
# a fiftieth of its rows
_LEAST_STEPS = 100


@final
class Sgd(Solver):
    """Minimises by steps ``w -= lr * (mean gradient of all ranks' batches + penalties)``.

    A gradient has an element wherever a row in the batch has one.  No element is dropped or compressed:
    up to rounding, steps are the same as on a single rank with the combined batch, whichever exchange is
    used.  Every rank holds a replica of the model; totals, and so replicas, are bit-identical.

    Args (in addition to those of ``Solver``):
        batch_size: rows per rank and step; None means the paper's 1,000, or fewer to get 100 steps
            per epoch.
        lr: initial learning rate.  With "adagrad", None means 1, in units of the scores.  With any
            other schedule, None means the inverse of a bound on the curvature.  With this rate, gradient
            descent is certain to descend, but slowly; well-conditioned data allow higher rates.  The
            bound is ``c (mean |x_i|^2 + intercept) + l2``, where c is the loss's curvature.  The hinge
            loss has no curvature, so c is set to 1, which is not a bound.
        schedule: one of ``SCHEDULES``, with t in epochs; "adagrad" has a rate for every weight, which
            decreases as the weight's gradients add up (``AdaptiveWeights``).
        staleness: step t uses exactly the totals up to step t - 1 - staleness; an epoch ends when all
            exchanges have ended.  With 0, training is synchronous.
        background: the engine that runs exchanges during the computation.  With None, an exchange runs
            when its result is needed.  This is always so in the simulator, whose clock does not include
            computation.
        shuffle: whether to draw a new order of the rows in each epoch; False keeps their stored order.

    Cost: per step, one exchange of the gradient's entries, and O(entries of the batch + n) operations.
    State: weights, step.
    Differs from the paper: there is an intercept, which is not penalised.  AdaGrad's rates are the
    default: the paper names no schedule, and on trigrams, a constant rate reaches 81 % in five epochs,
    but AdaGrad reaches SCD's 96 % (``docs/linear.md``).  Asynchronous steps have a fixed delay, so that
    runs are reproducible (the paper does not state its delay).

    References: Renggli et al., SparCML, SC 2019, sections 7 and 8.2 (batches of 1,000 per rank).
    """

    def __init__(
        self,
        comm: Communicator,
        problem: Problem,
        exchange: str = "split-allgather",
        *,
        batch_size: int | None = None,
        lr: float | None = None,
        schedule: str = "adagrad",
        staleness: int = 0,
        background: Engine | None = None,
        shuffle: bool = True,
        **shared: Any,
    ) -> None:
        super().__init__(comm, problem, exchange, **shared)
        known = ", ".join(SCHEDULES)
        require(schedule in SCHEDULES, f"unknown schedule {schedule!r}; choose one of {known}")
        require(lr is None or 0 < lr < math.inf, f"lr is {lr}; give a number > 0")
        rows = batch_size is None or batch_size >= 1
        require(rows, f"batch_size is {batch_size}; give at least 1 row")
        require(staleness >= 0, f"staleness is {staleness}; give a number of steps >= 0")
        self._batch_size, self.lr, self.schedule, self.shuffle = batch_size, lr, schedule, shuffle
        if schedule == "adagrad":
            self.weights = problem.weights(AdaptiveWeights)
        self.staleness, self.background = staleness, background
        # each exchange in flight needs its own collective and channel
        self._slots = [
            (self._collective(Dense, None), comm.channel(comm.tag + i))
            for i in range(staleness + 1)
        ]
        self.facts = {"batch_size": batch_size, "staleness": staleness, "schedule": (schedule, lr)}
        self.facts["options of the exchange"] = settings_of(self._slots[0][0])
        self._in_flight: deque[tuple[Callable[[], Awaitable[Reduced]], float]] = deque()

    @property
    def batch_size(self) -> int:
        """The number of rows per rank and step; unless given, known only after ``start``."""
        return self._batch_size or max(min(_BATCH, max(self.rows) // _LEAST_STEPS), 1)

    def _whole_pass(self) -> int:
        """Return the number of steps for a pass on the rank with the most rows."""
        return -(-max(self.rows) // self.batch_size)

    async def start(self, epochs: int | None = None) -> None:
        """Start like any ``Solver``; also measure the rows, and choose a learning rate unless given."""
        await super().start(epochs)
        problem, weights = self.problem, self.weights
        if self.lr is not None and not isinstance(weights, AdaptiveWeights):
            return
        squares = float((problem.features.data.astype(np.float64) ** 2).sum())
        total, rows = await _sum_over_ranks(self.comm, [squares, problem.rows], "lr")
        mean = total / max(rows, 1)
        bound = (problem.loss.curvature or 1.0) * (mean + problem.intercept) + problem.l2
        if isinstance(weights, AdaptiveWeights):
            weights.measure_by(math.sqrt(mean) or 1.0)
            bound = 1.0
        self.lr = self.lr or (1 / bound if bound else 1.0)

    async def epoch(self, epoch: int, advance: Callable[[int], None] = lambda steps: None) -> None:
        """Use every row once."""
        order = np.arange(self.problem.rows)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch, self.comm.rank]).permutation(order)
        for turn in range(self.epoch_steps):
            with self.meter.computing():
                gradient = self._gradient(order, turn)
            await self._exchange(gradient)
            self.step += 1
            advance(self.epoch_steps)
        while self._in_flight:
            await self._exchange(None)

    def _gradient(self, order: Integers, turn: int) -> SparseVector:
        """Return this rank's contribution to the mean gradient over all ranks' rows in this step."""
        start, problem = turn * self.batch_size, self.problem
        rows = order[start : start + self.batch_size]
        together = sum(min(max(n - start, 0), self.batch_size) for n in self.rows)
        batch, labels = problem.features[rows], problem.labels[rows]
        margins = labels * self.products.scores(batch, self.weights)
        slopes = labels * problem.loss.slope(margins) / problem.dtype.type(together)
        return self.products.transposed(batch, slopes)

    async def _exchange(self, gradient: SparseVector | None) -> None:
        """Start the exchange of the gradient, if any, and apply the total that is due."""
        arrived: Reduced | None = None
        with self.meter.exchanging("gradient"):
            if gradient is not None:
                self._send(gradient)
            if gradient is None or len(self._in_flight) > self.staleness:
                result, lr = self._in_flight.popleft()
                arrived = await result()
        if arrived is not None:
            with self.meter.computing():
                self.weights.apply_(arrived.total, lr)

    def _send(self, gradient: SparseVector) -> None:
        assert self.lr is not None, "start() first"
        lr = self.lr / SCHEDULES[self.schedule](self.step / max(self.epoch_steps, 1))
        collective, channel = self._slots[self.step % len(self._slots)]
        result = partial(collective.reduce, channel, gradient, gradient.size, self.step)
        if self.background is not None:
            result = partial(_end_of, self.background.submit(result()))
        self._in_flight.append((result, lr))


async def _end_of(job: Future[Reduced]) -> Reduced:
    """Return the result of a background exchange, whose own waits have deadlines."""
    return job.result()


# ---- coordinate descent -----------------------------------------------------------------------------


@final
class Scd(Solver):
    """Minimises by exact steps in a few coordinates per rank, on all ranks in parallel.

    1. The seed determines all coordinates of the step on all ranks.  Each rank computes partial
       derivatives and curvatures for all of them on its own rows, and sends each rank the numbers for
       that rank's coordinates.
    2. A rank sums these numbers in rank order and takes the proximal Newton step in each of its
       coordinates.  It uses a bound on the whole block's curvature: if c of its coordinates occur in one
       row, ``(sum of c terms)^2 <= c * sum of squares``.  The objective therefore never increases.
    3. A sparse allgather distributes the updates; every rank updates the weights and its rows' scores.

    Args (in addition to those of ``Solver``, whose problem must have a smooth loss):
        coordinates: number of coordinates per rank and step (paper: 100); it is smaller at the end of a
            slice.

    Cost: per step, P - 1 messages of 16 bytes per coordinate, and an allgather of at most 8 bytes per
    coordinate from every rank.   State: weights, this rank's scores (8 bytes per row), and a copy of
    the features by columns.

    Differs from the paper: the paper specifies neither how a rank obtains the derivatives on other ranks'
    rows (message 1) nor the step size.  Coordinates are drawn without replacement, and only from those
    that occur in the data (one allreduce of n bytes at the start).  Every step updates the intercept.

    References: Renggli et al., SparCML, SC 2019, section 8.2; Wright, "Coordinate descent
    algorithms", Mathematical Programming 151, 2015; Richtárik and Takáč, "Parallel coordinate descent
    methods for big data optimization", 2016 (separable bounds).
    """

    DERIVATIVES: ClassVar[str] = "derivatives"  # phase of message 1, the same with every exchange

    def __init__(
        self,
        comm: Communicator,
        problem: Problem,
        exchange: str = "allgather",
        *,
        coordinates: int = 100,
        **shared: Any,
    ) -> None:
        super().__init__(comm, problem, exchange, **shared)
        require(coordinates >= 1, f"coordinates is {coordinates}; give at least 1")
        require(
            problem.loss.curvature is not None,
            f"scd needs a smooth loss, {problem.model} has a corner; choose logistic, or sgd",
        )
        self.coordinates, self.curvature = coordinates, problem.loss.curvature
        self.collective = self._collective(DenseSlices, 1.0)
        self.facts = {"coordinates": coordinates, "seed": self.seed}
        self.facts["options of the exchange"] = settings_of(self.collective)
        ones = np.ones((problem.rows, 1), problem.dtype)
        # the intercept is an extra last column of ones
        self.columns = hstack([problem.features, ones], format="csc")
        self.scores = np.zeros(problem.rows)
        self.slices: list[Integers] = []

    def _whole_pass(self) -> int:
        """Return how many steps it takes to update every coordinate of the largest slice."""
        return max(-(-max(map(len, self.slices)) // self.coordinates), 1)

    async def start(self, epochs: int | None = None) -> None:
        """Start like any ``Solver``; also find the columns that occur in the data."""
        await super().start(epochs)
        here = torch.from_numpy(np.diff(self.columns.indptr)[:-1] > 0).to(torch.uint8)
        occurring = (await self.comm.allreduce(here, "occurring", "max")).numpy().nonzero()[0]
        # updates have an additional element for the intercept; ``DenseSlices`` cuts at the same indices
        cuts = even_boundaries(self.problem.dimensions + 1, self.comm.world_size)
        self.slices = np.split(occurring, np.searchsorted(occurring, cuts[1:-1]))

    async def epoch(self, epoch: int, advance: Callable[[int], None] = lambda steps: None) -> None:
        """Update every coordinate once, in random order."""
        orders = [
            np.random.default_rng([self.seed, epoch, owner]).permutation(coordinates)
            for owner, coordinates in enumerate(self.slices)
        ]
        for turn in range(self.epoch_steps):
            with self.meter.computing():
                owned = self._owned(orders, turn)
                coordinates = np.concatenate(owned)
                columns = self.columns[:, coordinates]
                partial_sums = self._derivatives(owned, columns)
            with self.meter.exchanging(self.DERIVATIVES):
                derivatives = await self._sum(partial_sums)
            with self.meter.computing():
                update = self._update(owned[self.comm.rank], derivatives)
            with self.meter.exchanging("updates"):
                k = self.coordinates + 1
                reduced = await self.collective.reduce(self.comm, update, k, self.step)
            with self.meter.computing():
                self._apply(coordinates, columns, reduced.total)
            self.step += 1
            advance(self.epoch_steps)

    def _owned(self, orders: Sequence[Integers], turn: int) -> list[Integers]:
        """Return every rank's coordinates for a step; they ascend within and across ranks."""
        part = slice(turn * self.coordinates, (turn + 1) * self.coordinates)
        owned = [np.sort(order[part]) for order in orders]
        if self.problem.intercept:
            owned[-1] = np.append(owned[-1], self.problem.dimensions)
        return owned

    def _derivatives(self, owned: Sequence[Integers], columns: csc_matrix) -> list[Floats]:
        """Return `[2, coordinates]` per rank: first derivatives, and bounds on the second derivatives."""
        labels = self.problem.labels
        slopes = labels * self.problem.loss.slope(labels * self.scores)
        meeting = np.bincount(columns.indices, minlength=self.problem.rows)
        first = columns.T @ slopes.astype(np.float64)
        second = self.curvature * (columns.power(2).T @ meeting.astype(np.float64))
        both = np.stack([first, second]) / max(sum(self.rows), 1)
        return np.split(both, np.cumsum([len(mine) for mine in owned])[:-1], axis=1)

    async def _sum(self, partial_sums: list[Floats]) -> Floats:
        """Sum the derivatives for this rank's coordinates over all ranks, in rank order."""
        own = partial_sums[self.comm.rank]
        widest = max(1, *(part.shape[1] for part in partial_sums))  # all messages have this length
        blocks = torch.zeros(len(partial_sums), 2, widest, dtype=torch.float64, device="cpu")
        for block, part in zip(blocks, partial_sums, strict=True):
            block[:, : part.shape[1]] = torch.from_numpy(part)
        payloads = list(blocks.view(len(partial_sums), -1).view(torch.uint8))
        capacities = [payloads[0].numel()] * len(partial_sums)
        received = await self.comm.alltoallv(payloads, capacities, self.DERIVATIVES, Raw("value"))
        total = torch.zeros_like(blocks[0])
        for payload in received:
            total += payload.clone().view(torch.float64).view(2, widest)  # aligned by ``clone``
        sums: Floats = total[:, : own.shape[1]].numpy()
        return sums

    def _update(self, owned: Integers, derivatives: Floats) -> SparseVector:
        """Return the changes in this rank's coordinates."""
        is_weight = owned < self.problem.dimensions
        current = np.full(len(owned), self.weights.intercept)
        current[is_weight] = self.weights.at(owned[is_weight])
        l1, l2 = self.problem.l1 * is_weight, self.problem.l2 * is_weight
        slopes, curvatures = derivatives[0] + l2 * current, derivatives[1] + l2
        moves = curvatures > 0  # a column of zeros has no curvature, so its weight does not change
        curvatures = np.where(moves, curvatures, 1)
        targets = soft(current - slopes / curvatures, l1 / curvatures)
        changes = np.where(moves, targets - current, 0).astype(self.problem.dtype)
        indices, values = torch.from_numpy(owned.astype(np.int64)), torch.from_numpy(changes)
        stored = values.nonzero().flatten()
        return SparseVector(indices[stored], values[stored], self.problem.dimensions + 1)

    def _apply(self, coordinates: Integers, columns: csc_matrix, total: Vector) -> None:
        """Update the weights, and the scores of this rank's rows."""
        self.weights.add_(total)
        if isinstance(total, SparseVector):
            changes = np.zeros(len(coordinates))
            places = np.searchsorted(coordinates, total.indices.numpy())
            changes[places] = total.values.numpy()
        else:
            changes = total.values.numpy()[coordinates].astype(np.float64)
        self.scores += columns @ changes


SOLVERS: MappingProxyType[str, type[Solver]] = MappingProxyType({"sgd": Sgd, "scd": Scd})
