"""Distributed random block coordinate descent, which exchanges a few updated coordinates per rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from scipy.sparse import csc_matrix, hstack  # type: ignore[import-untyped, unused-ignore]

from sparsync.collectives.base import Collective
from sparsync.errors import ConfigurationError
from sparsync.linear.problem import Floats, Integers, Problem, soft
from sparsync.linear.products import Products, even_cuts
from sparsync.linear.solver import Meter, Solver
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.ledger import Raw

__all__ = ["Scd"]


@dataclass(frozen=True, eq=False)
class _Block:
    """The coordinates of one step, of all ranks.

    Attributes:
        owned: per rank, ascending; ascending from rank to rank, too.
        coordinates: all of them.
        columns: `[rows, len(coordinates)]` of this rank's rows.
    """

    owned: list[Integers]
    coordinates: Integers
    columns: csc_matrix


@final
class Scd(Solver):
    """Minimises by exact steps in a few coordinates per rank, all ranks at once.

    1. All ranks know all coordinates of the step (seeded); each computes, from its own rows, their
       partial derivatives and curvatures, and sends every rank those of its coordinates.
    2. A rank sums them in rank order and takes the proximal Newton step in each of its coordinates,
       with a curvature that bounds the whole block's: where c of its coordinates meet in a row,
       ``(sum of c terms)^2 <= c * sum of squares``.  So the objective never rises.
    3. A sparse allgather of the updates; every rank changes the weights, and its rows' scores.

    Args:
        comm: the group.
        problem: this rank's rows; its loss must have a curvature.
        make_collective: what collects the updates.
        products: threads, for evaluations.
        coordinates: per rank and step (paper: 100); fewer where the slice has no more left.
        seed: of their order.
        steps: most steps of an epoch; None: until every coordinate had its turn.
        meter: measures.

    Cost: per step P - 1 messages of 16 bytes per coordinate, and the allgather: at most 8 bytes per
    coordinate from every rank.   State: weights, this rank's scores (8 bytes per row), and a copy of
    the features by columns.

    Differs from the paper: it does not say how a rank knows the derivative at rows that others have
    (message 1 here), nor the step size; coordinates are drawn without putting back; only those that
    occur in the data (one allreduce of n bytes at the start); the intercept moves in every step.

    References: Renggli et al., SparCML, SC 2019, section 8.2; Wright, "Coordinate descent
    algorithms", Mathematical Programming 151, 2015; Richtárik and Takáč, "Parallel coordinate descent
    methods for big data optimization", 2016 (separable bounds).
    """

    def __init__(
        self,
        comm: Communicator,
        problem: Problem,
        make_collective: Callable[[], Collective],
        *,
        products: Products | None = None,
        coordinates: int = 100,
        seed: int = 0,
        steps: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        super().__init__(comm, problem, products, meter)
        if coordinates < 1:
            raise ConfigurationError(f"coordinates is {coordinates}; give at least 1")
        if problem.loss.curvature is None:
            raise ConfigurationError(
                f"scd needs a smooth loss, {problem.loss.name} has a corner; choose logistic, or sgd"
            )
        self.curvature = problem.loss.curvature
        self.collective = make_collective()
        self.coordinates, self.seed, self.steps = coordinates, seed, steps
        ones = np.ones((problem.rows, 1), problem.dtype)
        # the intercept is a column of ones after the last
        self.columns = hstack([problem.features, ones], format="csc")
        self.scores = np.zeros(problem.rows)
        self.slices: list[Integers] = []
        self.rows_total = 0
        self.step = 0

    async def start(self) -> None:
        """Compare the ranks, count their rows, find the columns that occur."""
        await self.problem.agree(
            self.comm, coordinates=self.coordinates, seed=self.seed, steps=self.steps
        )
        counts = await self.comm.allgather(torch.tensor([self.problem.rows]), "rows")
        self.rows_total = sum(int(count) for count in counts)
        here = torch.from_numpy(np.diff(self.columns.indptr)[:-1] > 0).to(torch.uint8)
        occurring = (await self.comm.allreduce(here, "occurring", "max")).numpy().nonzero()[0]
        # the vector of updates has one element more, the intercept's: cut as that is cut
        cuts = even_cuts(self.problem.dimensions + 1, self.comm.world_size)
        self.slices = np.split(occurring, np.searchsorted(occurring, cuts[1:-1]))

    @property
    def epoch_steps(self) -> int:
        """Steps per epoch, on every rank: until the fullest slice is through."""
        all_turns = max(-(-max(len(s) for s in self.slices) // self.coordinates), 1)
        return all_turns if self.steps is None else min(all_turns, self.steps)

    async def epoch(self, epoch: int, advance: Callable[[int], None]) -> None:
        """Give every coordinate one turn, in random order."""
        orders = [
            np.random.default_rng([self.seed, epoch, owner]).permutation(coordinates)
            for owner, coordinates in enumerate(self.slices)
        ]
        for turn in range(self.epoch_steps):
            with self.meter.computing():
                block = self._block(orders, turn)
                partial = self._derivatives(block)
            with self.meter.exchanging("derivatives"):
                derivatives = await self._sum(partial)
            with self.meter.computing():
                update = self._update(block.owned[self.comm.rank], derivatives)
            with self.meter.exchanging("updates"):
                k = self.coordinates + 1
                reduced = await self.collective.reduce(self.comm, update, k, self.step)
            with self.meter.computing():
                self._apply(block, reduced.total)
            self.step += 1
            advance(self.epoch_steps)

    def _block(self, orders: list[Integers], turn: int) -> _Block:
        part = slice(turn * self.coordinates, (turn + 1) * self.coordinates)
        owned = [np.sort(order[part]) for order in orders]
        if self.problem.intercept:
            owned[-1] = np.append(owned[-1], self.problem.dimensions)
        coordinates = np.concatenate(owned)
        return _Block(owned, coordinates, self.columns[:, coordinates])

    def _derivatives(self, block: _Block) -> list[Floats]:
        """Return, per rank, `[2, its coordinates]`: first derivatives and bounds of the second ones."""
        columns, labels = block.columns, self.problem.labels
        slopes = labels * self.problem.loss.slope(labels * self.scores)
        meeting = np.bincount(columns.indices, minlength=self.problem.rows)
        first = columns.T @ slopes.astype(np.float64)
        second = self.curvature * (columns.power(2).T @ meeting.astype(np.float64))
        both = np.stack([first, second]) / max(self.rows_total, 1)
        return np.split(both, np.cumsum([len(owned) for owned in block.owned])[:-1], axis=1)

    async def _sum(self, partial: list[Floats]) -> Floats:
        """Return the sums over ranks of the derivatives of this rank's coordinates, in rank order."""
        own = partial[self.comm.rank]
        widest = max(1, *(part.shape[1] for part in partial))  # messages of one length
        blocks = torch.zeros(len(partial), 2, widest, dtype=torch.float64)
        for block, part in zip(blocks, partial, strict=True):
            block[:, : part.shape[1]] = torch.from_numpy(part)
        payloads = list(blocks.view(len(partial), -1).view(torch.uint8))
        capacities = [payloads[0].numel()] * len(partial)
        received = await self.comm.alltoallv(payloads, capacities, "derivatives", Raw("value"))
        total = torch.zeros_like(blocks[0])
        for payload in received:
            total += payload.clone().view(torch.float64).view(2, widest)  # a copy is aligned
        sums: Floats = total[:, : own.shape[1]].numpy()
        return sums

    def _update(self, owned: Integers, derivatives: Floats) -> SparseVector:
        """Return the changes of this rank's coordinates."""
        is_weight = owned < self.problem.dimensions
        current = np.full(len(owned), self.weights.intercept)
        current[is_weight] = self.weights.at(owned[is_weight])
        l1, l2 = self.problem.penalty.l1 * is_weight, self.problem.penalty.l2 * is_weight
        slopes, curvatures = derivatives[0] + l2 * current, derivatives[1] + l2
        moves = curvatures > 0  # a column of zeros decides nothing
        curvatures = np.where(moves, curvatures, 1)
        targets = soft(current - slopes / curvatures, l1 / curvatures)
        changes = np.where(moves, targets - current, 0).astype(self.problem.dtype)
        indices, values = torch.from_numpy(owned.astype(np.int64)), torch.from_numpy(changes)
        stored = values.nonzero().flatten()
        return SparseVector(indices[stored], values[stored], self.problem.dimensions + 1)

    def _apply(self, block: _Block, total: Vector) -> None:
        """Change the weights, and the scores of this rank's rows."""
        self.weights.add_(total)
        if isinstance(total, SparseVector):
            changes = np.zeros(len(block.coordinates))
            places = np.searchsorted(block.coordinates, total.indices.numpy())
            changes[places] = total.values.numpy()
        else:
            changes = total.values.numpy()[block.coordinates].astype(np.float64)
        self.scores += block.columns @ changes
