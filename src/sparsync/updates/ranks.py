"""The ranks that exchange updates: all ranks of a job, or the present ones (``elastic.updates``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import Tensor

from sparsync.feedback.changes import begin_together
from sparsync.handle import Presence
from sparsync.transports.agree import equalise_, on_all_or_none
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.updates.outer_engine import OuterEngine
from sparsync.updates.weights import ModelWeights

__all__ = ["AllRanks", "UpdateRanks"]


class UpdateRanks(ABC):
    """The ranks that exchange updates.

    Attributes:
        membership: this rank's membership, which lets it leave.
        asked: whether ranks ask each other which weights they begin with; if so, all of them must do so
            together.
    """

    membership: Presence
    asked = True

    @abstractmethod
    def before_forward(self, step: Callable[[], None]) -> None:
        """Prepare for a forward pass; ``step`` takes a local step of the handle."""

    @abstractmethod
    def before_step(self) -> None:
        """Prepare for the optimizer's writes to the weights, until the next ``step``."""

    @abstractmethod
    def check_together(self, comms: Sequence[Communicator], check: Callable[[], None]) -> None:
        """Run a check before the first step after a load; if it fails on any rank, raise on all."""

    @abstractmethod
    def begin_together(
        self, comms: Sequence[Communicator], loaded: bool, own: Tensor, since: str
    ) -> bool:
        """Return whether all ranks begin from weights loaded after ``attach``; see ``begin_together``."""

    @abstractmethod
    def step(self) -> AbstractContextManager[bool]:
        """Return the context in which a local step runs; it yields False if the step must be left out."""

    @abstractmethod
    def finish(self) -> None:
        """Exchange everything that is left, and make replicas equal."""


@final
class AllRanks(UpdateRanks):
    """The ranks that have called ``attach`` together."""

    def __init__(self, outer: OuterEngine, weights: ModelWeights) -> None:
        self._outer, self._weights, self.membership = outer, weights, Presence()

    def before_forward(self, step: Callable[[], None]) -> None:
        """Do nothing."""

    def before_step(self) -> None:
        """Do nothing."""

    def check_together(self, comms: Sequence[Communicator], check: Callable[[], None]) -> None:
        """Run the check on all ranks; if it fails on any of them, raise on all."""
        run(on_all_or_none(comms, check, "begin after a load"))

    def begin_together(
        self, comms: Sequence[Communicator], loaded: bool, own: Tensor, since: str
    ) -> bool:
        """Ask all ranks whether they begin from loaded weights."""
        with comms[0].exchange():
            return begin_together(comms, loaded, own, since)

    def step(self) -> AbstractContextManager[bool]:
        """Return a context that yields True: every step is taken."""
        return nullcontext(True)

    def finish(self) -> None:
        """Deliver everything that is left, uncompressed."""
        run(self._outer.settle())  # exchanges in flight still count for the steps that started them
        node, comm = self._weights.node, self._outer.reducer.comm
        with comm.ledger.outside_steps():
            run(self._outer.deliver())
            # these tensors were not exchanged, and DDP's broadcast before every forward pass is off
            others = self._weights.others()
            with self._outer.reducer.exchanging():
                for ranks in [comm] if node is None else [node.consensus.parts, comm]:
                    run(equalise_(ranks, others))
