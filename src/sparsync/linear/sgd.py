"""Distributed mini-batch SGD, which exchanges gradients as sparse as the data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, final

import numpy as np
import torch

from sparsync.collectives.base import Collective, Reduced
from sparsync.errors import ConfigurationError
from sparsync.linear.problem import Integers, Problem, suggested_lr
from sparsync.linear.products import Products
from sparsync.linear.solver import Meter, Schedule, Solver
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Operation

__all__ = ["Background", "InFlight", "Sgd"]


@final
class Sgd(Solver):
    """Minimises by steps ``w -= lr * (mean gradient of all ranks' batches + penalties)``.

    A gradient has an element where a row of the batch has one.  Nothing is dropped or rounded: with
    any lossless collective the steps are those of one rank with the united batch, to rounding.  The
    model is replicated; since totals are bit-identical, so are the replicas.

    Args:
        comm: the group.
        problem: this rank's rows; equal dimensions, loss and penalties on all ranks.
        make_collective: what sums the gradients; called once per exchange in flight.
        products: threads.
        batch_size: rows per rank and step.
        schedule: learning rates; its ``lr`` is a factor of ``suggested_lr`` if ``lr_is_factor``.
        lr_is_factor: see there.
        staleness: steps t compute with the totals up to t - 1 - staleness, exactly; an epoch ends
            with nothing in flight.  0: synchronous.
        background: runs exchanges during the computation.
        shuffle: rows in a new order in each epoch; else in theirs.
        seed: of the order.
        steps: most steps of an epoch; None: all rows once.
        meter: measures.

    Cost: per step one exchange of the gradient's entries; O(entries of the batch + n / threads).
    State: weights, step.   Differs from the paper: an intercept, which is not penalised; asynchronous
    steps are late by a fixed number, so that a run can be repeated (the paper does not say).

    References: Renggli et al., SparCML, SC 2019, sections 7 and 8.2 (batches of 1,000 per rank).
    """

    def __init__(
        self,
        comm: Communicator,
        problem: Problem,
        make_collective: Callable[[], Collective],
        *,
        products: Products | None = None,
        batch_size: int = 1000,
        schedule: Schedule = Schedule(),  # noqa: B008 (frozen)
        lr_is_factor: bool = False,
        staleness: int = 0,
        background: Background | None = None,
        shuffle: bool = True,
        seed: int = 0,
        steps: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(comm, problem, products, meter)
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}; give at least 1 row")
        self.schedule, self.lr_is_factor = schedule, lr_is_factor
        self.batch_size, self.shuffle, self.seed, self.steps = batch_size, shuffle, seed, steps
        self.in_flight = InFlight(comm, make_collective, staleness, background)
        self.step, self.lr_unit, self.rows = 0, 1.0, [problem.rows]

    async def start(self) -> None:
        """Compare the ranks, count their rows."""
        await self.problem.agree(
            self.comm,
            batch_size=self.batch_size,
            schedule=self.schedule,
            staleness=self.in_flight.staleness,
            steps=self.steps,
        )
        counts = await self.comm.allgather(torch.tensor([self.problem.rows]), "rows")
        self.rows = [int(count) for count in counts]
        if self.lr_is_factor:
            self.lr_unit = await suggested_lr(self.comm, self.problem)

    @property
    def epoch_steps(self) -> int:
        """Steps per epoch, on every rank: those of the rank with most rows."""
        all_rows = -(-max(self.rows) // self.batch_size)
        return all_rows if self.steps is None else min(all_rows, self.steps)

    async def epoch(self, epoch: int, advance: Callable[[int], None]) -> None:
        """Use every row once; ``advance`` is told the number of steps."""
        order, rates = self._order(epoch), deque[float]()
        for turn in range(self.epoch_steps):
            with self.meter.computing():
                gradient = self._gradient(order, turn)
            rates.append(self.lr_unit * self.schedule.rate(self.step, self.epoch_steps))
            arrived: Reduced | None = None
            with self.meter.exchanging("gradient"):
                self.in_flight.start(gradient, self.step)
                if len(self.in_flight) > self.in_flight.staleness:
                    arrived = await self.in_flight.oldest()
            if arrived is not None:
                self._apply(arrived, rates.popleft())
            self.step += 1
            advance(self.epoch_steps)
        while self.in_flight:
            with self.meter.exchanging("gradient"):
                arrived = await self.in_flight.oldest()
            self._apply(arrived, rates.popleft())

    def _order(self, epoch: int) -> Integers:
        if not self.shuffle:
            return np.arange(self.problem.rows)
        generator = np.random.default_rng([self.seed, epoch, self.comm.rank])
        return generator.permutation(self.problem.rows)

    def _gradient(self, order: Integers, turn: int) -> SparseVector:
        """Return this rank's part of the mean gradient over all ranks' rows of this step."""
        start, problem = turn * self.batch_size, self.problem
        rows = order[start : start + self.batch_size]
        together = sum(min(max(n - start, 0), self.batch_size) for n in self.rows)
        batch, labels = problem.features[rows], problem.labels[rows]
        margins = labels * self.products.scores(batch, self.weights)
        slopes = labels * problem.loss.slope(margins) / problem.dtype.type(together)
        return self.products.transposed(batch, slopes)

    def _apply(self, reduced: Reduced, lr: float) -> None:
        with self.meter.computing():
            self.weights.apply_(reduced.total, lr)


class Background(Protocol):
    """Runs exchanges while the rank computes: ``transports.driver.Engine``."""

    def submit(self, job: Coroutine[Operation, None, Reduced]) -> Future[Reduced]:
        """Queue an exchange; the future has its result."""


@final
class InFlight:
    """The exchanges of one rank, at most ``staleness + 1`` at once, each on a channel of its own.

    Args:
        comm: the group; while exchanges are under way, nobody else may use it.
        make_collective: builds what sums; called once per channel.
        staleness: how many exchanges stay under way when a step ends.
        background: runs them during the computation; None: each runs when its result is waited for
            (always so in the simulator, whose clock charges no computation).

    State: the exchanges, and that of the collectives.
    """

    def __init__(
        self,
        comm: Communicator,
        make_collective: Callable[[], Collective],
        staleness: int = 0,
        background: Background | None = None,
    ) -> None:
        if staleness < 0:
            raise ConfigurationError(f"staleness is {staleness}; give a number of steps >= 0")
        self.staleness, self.background = staleness, background
        self._channels = [comm.channel(comm.tag + i) for i in range(staleness + 1)]
        self._collectives = [make_collective() for _ in self._channels]
        self._pending: deque[Callable[[], Coroutine[Any, None, Reduced]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, vector: Vector, step: int) -> None:
        """Send a vector on its way."""
        assert len(self) <= self.staleness, "await the oldest first"
        slot = step % (self.staleness + 1)
        reduce, channel = self._collectives[slot].reduce, self._channels[slot]
        program = partial(reduce, channel, vector, vector.size, step)
        if self.background is None:
            self._pending.append(program)
        else:
            self._pending.append(partial(_arrival, self.background.submit(program())))

    async def oldest(self) -> Reduced:
        """Return the oldest exchange's result when it is there."""
        return await self._pending.popleft()()


async def _arrival(future: Future[Reduced]) -> Reduced:
    await _Arrival(future)
    return future.result()


@final
class _Arrival(Operation):
    """The end of an exchange in the background."""

    def __init__(self, future: Future[Reduced]) -> None:
        self.future, self.done = future, future.done()

    def wait(self) -> None:
        """Wait for it; its own waits have deadlines."""
        self.future.exception()
        self.done = True
