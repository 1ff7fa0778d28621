"""The seam of the solvers: weights, epochs, evaluations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from sparsync.linear.meter import Meter
from sparsync.linear.problem import Evaluation, Problem, evaluate
from sparsync.linear.products import Products
from sparsync.transports.base import Communicator

__all__ = ["Solver"]


class Solver(ABC):
    """Trains one linear model on the rows of all ranks; every rank makes every call.

    Attributes:
        weights: the model, the same bits on all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        problem: Problem,
        products: Products | None,
        meter: Meter | None,
    ) -> None:
        self.comm, self.problem = comm, problem
        self.products, self.meter = products or Products(), meter or Meter()
        self.weights = problem.weights()

    @abstractmethod
    async def start(self) -> None:
        """Agree with the other ranks on what is solved; called once, before all else.

        Raises:
            PeerError: ranks disagree; names what and who.
        """

    @property
    @abstractmethod
    def epoch_steps(self) -> int:
        """Steps of an epoch, equal on all ranks; known when started."""

    @abstractmethod
    async def epoch(self, epoch: int, advance: Callable[[int], None]) -> None:
        """Do the steps of a 0-based epoch; ``advance`` is called after each with their number."""

    async def evaluate(self, problem: Problem | None = None) -> Evaluation:
        """Evaluate the weights on other rows, or on those of the training."""
        return await evaluate(self.comm, problem or self.problem, self.weights, self.products)
