"""Eager-SGD: partial allreduces of the ranks' updates, which start before all ranks have arrived."""

from __future__ import annotations

import random
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from sparsync.averaging.averager import Accompanied, Staleness
from sparsync.errors import check_numbers, require
from sparsync.published.wagma.agents import (
    Agent,
    Answer,
    Round,
    Rounds,
    finish_of,
    is_finish,
    round_of,
    step_of,
)
from sparsync.transports.agree import equalise_
from sparsync.transports.communicator import Communicator

__all__ = ["EagerRounds", "EagerSgd", "Quorum"]

Quorum = Literal["solo", "majority"]


@final
class EagerSgd(Accompanied):
    """Sums all ranks' updates on every step; updates of late ranks are added to a later sum.

    ::

        waiting = waiting + (W' - W)           W' - W is this rank's local step
        sum     = partial allreduce(waiting)   started by the first rank, or by a random one
        shared  = shared + sum / P             equal on ranks that have the same sums
        W       = shared + waiting             pending updates stay in this rank's weights

    Args:
        quorum: "solo": the first rank to arrive starts the sum.  "majority": a rank that is drawn at
            random for each step starts it, so that half of the ranks, on average, have arrived.

    Cost: one dense allreduce per step; memory: 3 n.
    State: the shared model; pending updates are in the rank's own weights.  A resumed run begins from
    rank 0's shared model, and the difference between a rank's weights and this model is pending.
    Differs from the paper: ranks send the updates of their local optimizers instead of gradients; for SGD
    with or without momentum, the result is the same.  A late rank applies all sums that it has missed, so
    replicas need no periodic synchronisation.  Pending updates stay in the rank's own weights.  Otherwise
    they would arrive together as one long step, and training would diverge when ranks fall far behind.

    Example:
        >>> with EagerSgd(nn.Linear(2, 1), quorum="majority") as averager: averager.step()

    References: Li et al., Taming unbalanced training workloads in deep learning with partial
    collective operations, PPoPP 2020; WAGMA-SGD, IEEE TPDS 2021, section 2.2.
    """

    averaged: ClassVar[str] = "updates"
    # the paper bounds staleness by synchronising the models periodically; this scheme does not
    staleness: Staleness = "unbounded"

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        quorum: Quorum = "majority",
        seed: int = 0,
        **binding: Any,
    ) -> None:
        require(quorum in ("solo", "majority"), f"quorum is {quorum!r}; choose solo or majority")
        check_numbers(type(self).__name__, {"seed": "int"}, {"seed": seed})
        self.quorum, self.seed = quorum, seed
        self._finish = -1  # the version of the last ``finish``
        super().__init__(model, **binding)

    async def begin(self, comm: Communicator, vector: Tensor, step: int) -> None:
        """Start the agent with the initial model."""
        vector = vector.cpu()
        shared = self.memory.get("shared", vector).cpu().clone()
        if "shared" in self.memory:
            # The saved states of late ranks may contain fewer sums.  All ranks begin from rank 0's
            # shared model; a rank's difference from it counts as pending, so no update is lost.
            await equalise_(comm, {"the shared model": shared})
        self._taken = self.memory["shared"] = shared
        self._finish = -1  # reset it, because a loaded state may be from an earlier step
        rounds = EagerRounds(self.quorum, self.seed, comm.world_size, self._taken)
        self._agent = Agent(rounds, comm.world_size, step, torch.zeros_like(vector))
        self._run(comm, self._agent)

    async def average(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Pass this rank's local step to the agent; apply the sums that are complete."""
        return await self._sum(round_of(step), vector)

    async def conclude(self, comm: Communicator, vector: Tensor, step: int) -> Tensor:
        """Sum all ranks' pending updates; in this call, ranks wait for each other."""
        self._finish = finish_of(step, self._finish)
        return await self._sum(self._finish, vector)

    async def _sum(self, version: int, vector: Tensor) -> Tensor:
        # this rank's local step: its weights now, minus its weights after the last sum
        update = vector.cpu() - self._taken
        answer: Answer = await self._ask(
            step_of(version), lambda reply: self._agent.arrive(version, update, reply)
        )
        self.memory["shared"], waiting = answer.result.total
        self._taken = self.memory["shared"] + waiting
        return self._taken.to(vector.device)


@final
class EagerRounds(Rounds):
    """Adds sums of updates to ``shared`` one by one: ranks with the same sums agree bit for bit."""

    def __init__(self, quorum: Quorum, seed: int, world_size: int, shared: Tensor) -> None:
        self.quorum, self.seed, self.world_size = quorum, seed, world_size
        self.shared = shared
        self._waiting = torch.zeros_like(shared)  # updates that are in no sum yet
        self._given = self._waiting  # this rank's contribution to the current round

    def activates(self, version: int, rank: int) -> bool:
        """Return whether ``rank`` may start the sum: any rank for "solo", a random one for "majority"."""
        # the draw depends only on seed and step, so all ranks agree on it without a message
        if self.quorum == "solo" or is_finish(version):
            return True
        draw = random.Random(f"{self.seed} {2 * step_of(version) + 1}")
        return draw.randrange(self.world_size) == rank

    def publish(self, vector: Tensor) -> None:
        """Add an update to the pending updates."""
        self._waiting = self._waiting + vector

    async def reduce(self, comm: Communicator, version: int, contributed: int) -> Tensor:
        """Sum all ranks' pending updates."""
        # The contribution is fixed now: updates that are published while the sum is in flight are not
        # part of it, and stay pending.
        self._given = self._waiting
        return await comm.allreduce(self._given, "average")

    def end(self, result: Round) -> None:
        """Apply a sum; this rank's contribution is no longer pending."""
        self._waiting = self._waiting - self._given
        self.shared = self.shared + result.total / self.world_size

    def collected(self, newest: Round) -> Round:
        """Return the newest round with the shared model and this rank's pending updates, `[2, n]`."""
        return newest._replace(total=torch.stack([self.shared, self._waiting]))
