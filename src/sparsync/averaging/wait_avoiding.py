"""The externally triggerable group allreduce: whoever is first starts it for all (WAGMA, section 3).

A rank that is late takes part with the last model that it published, and finds the result when it
arrives.  A published vector is handed over and never changes, so nothing that is being sent is torn.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, final

import torch
from torch import Tensor

from sparsync.averaging import groups
from sparsync.averaging.agent import Agent
from sparsync.averaging.coded import coded_allreduce
from sparsync.averaging.companion import Companion
from sparsync.averaging.rounds import Answer, Round, Rounds, Welcome, round_of, step_of
from sparsync.transports.base import Communicator
from sparsync.transports.framing import Raw
from sparsync.wire import DenseCodec

__all__ = ["Grouping", "ModelRounds", "WaitAvoiding", "group_allreduce"]

Grouping = Literal["wait-avoiding", "synchronous", "none"]

_LOG = logging.getLogger("sparsync")
_ALPHA = 50e-6  # seconds per message, ours: as the simulator's default links
_BETA = 8e-9  # seconds per byte: 1 Gbit/s


@final
class ModelRounds(Rounds):
    """Rounds of WAGMA: group averages, and a global one when ``(step + 1) % sync_period == 0``.

    Args:
        world_size: P.
        group_size: S.
        sync_period: tau; None: never.
        grouping: group averages are "wait-avoiding", or "synchronous", or there are "none".
        dynamic: groups change from step to step.
        codec: of group averages; None: values travel as they are.

    With a codec, what travels is how far a model is from the last global average, which all ranks
    have.  What rounding takes away is added to what a rank contributes next::

        p = W' + error;   q = C(p - base);   error = p - base - q

    So the mean over ranks of W + error stays what it is while nobody is late.

    Attributes:
        error: `[n]`, None without a codec.
    """

    def __init__(
        self,
        world_size: int,
        group_size: int,
        sync_period: int | None,
        grouping: Grouping,
        *,
        dynamic: bool,
        codec: DenseCodec | None = None,
    ) -> None:
        self.world_size, self.group_size, self.sync_period = world_size, group_size, sync_period
        self.grouping, self.dynamic, self.codec = grouping, dynamic, codec
        self.error: Tensor | None = None
        self.published = self._round = -1
        self._vector = self._base = torch.empty(0)

    def has(self, step: int) -> bool:
        """Tell whether something is averaged behind a step."""
        return self.grouping != "none" or self.closes(step)

    def closes(self, step: int) -> bool:
        """Tell whether the average behind a step is global."""
        return self.sync_period is not None and (step + 1) % self.sync_period == 0

    def following(self, version: int) -> int:
        """Return the next round of a step."""
        following = super().following(version)
        step = step_of(following)
        if self.has(step):
            return following
        if self.sync_period is None:
            return round_of(2**61)  # never
        return round_of(step + self.sync_period - 1 - step % self.sync_period)

    def synchronous(self, version: int) -> bool:
        """Tell whether a rank takes part only when it has arrived itself."""
        return version % 2 == 0 or self.grouping != "wait-avoiding" or self.closes(step_of(version))

    def activates(self, version: int, rank: int) -> bool:
        """Any rank may be the first."""
        return True

    def members(self, version: int, present: Sequence[int], rank: int) -> Sequence[int]:
        """Return all that are present, or this rank's group among them."""
        step = step_of(version)
        if version % 2 == 0 or self.closes(step):
            return present
        place, count = list(present).index(rank), len(present)
        size = min(self.group_size, count)
        mine = groups.group_of(place, count, size, step if self.dynamic else 0)
        return [present[i] for i in mine]

    def restart(self, version: int, model: Tensor) -> None:
        """Begin with a model that all ranks have."""
        self._base = model
        if self.published >= 0:
            self.error = None  # it belonged to the model that is given up
        self.publish(version, model)

    def publish(self, version: int, vector: Tensor) -> None:
        """Contribute ``vector`` from now on; nobody changes it."""
        self.published = version
        self._vector = vector if self.error is None else vector + self.error

    def contribution(self, version: int) -> Tensor:
        """Return what was published last."""
        self._round = version
        return self._vector

    def end(self, result: Round) -> None:
        """Behind a global average: its mean is what ranks differ from; nothing is owed any more."""
        if result.version % 2 == 0 or self.closes(step_of(result.version)):
            self._base, self.error = result.total / result.models, None

    async def reduce(self, comm: Communicator, vector: Tensor) -> Tensor:
        """Sum over the group."""
        version = self._round
        if self.codec is None or version % 2 == 0 or self.closes(step_of(version)):
            return await group_allreduce(comm, vector)
        base, stale = self._base, self.published < version
        coded = await coded_allreduce(comm, vector - base, self.codec, version)
        # a stale model is an extra one: what rounding took from it is owed to nobody
        owed = self.error if stale else coded.lost
        self.error = coded.lost_of_sum if owed is None else owed + coded.lost_of_sum
        return base * comm.world_size + coded.total


@final
class WaitAvoiding:
    """A rank's way to its agent.

    Args:
        comm: of this rank; all ranks make one together.
        rounds: what is averaged.
        model: what all ranks begin with.
        step: of the first local step.
        deadline: see ``Agent``.

    Attributes:
        left_out: ranks that were left out: rank, step and reason.
        present: ranks that take part, ascending.
    """

    def __init__(
        self,
        comm: Communicator,
        rounds: ModelRounds,
        model: Tensor,
        step: int,
        deadline: float | None,
    ) -> None:
        first = rounds.following(2 * step)
        rounds.restart(first - 1, model)
        self.comm, self.rounds = comm, rounds
        self.left_out: tuple[tuple[int, int, str], ...] = ()
        self.present = list(range(comm.world_size))
        self._agent = Agent(rounds, first, model, deadline)
        self._companion = Companion(comm, self._agent)
        self._taken = first - 1

    async def average(self, version: int, vector: Tensor) -> Tensor | Welcome:
        """Arrive at a round; return the model that this rank goes on with, or a welcome."""
        answer: Answer = await self._companion.ask(
            step_of(version), lambda signal: self._agent.arrive(version, vector, signal)
        )
        self.comm.ledger.take(answer.books)
        for peer, step, reason in answer.left_out[len(self.left_out) :]:
            _LOG.warning("rank %d left out at step %d: %s", peer, step, reason)
        self.left_out, self.present = answer.left_out, answer.present
        came = answer.came
        if isinstance(came, Round):
            return self._mixed(came, version, vector)
        return vector if came is None else came

    def _mixed(self, result: Round, version: int, vector: Tensor) -> Tensor:
        """Apply lines 10 to 14 and 16 of Algorithm 2; a result is taken once."""
        if result.version <= self._taken:
            return vector
        self._taken = result.version
        if result.version == version == result.contributed:
            return result.total / result.models
        return (result.total + vector) / (result.models + 1)


async def group_allreduce(comm: Communicator, vector: Tensor) -> Tensor:
    """Sum over a group, by the cheaper way; equal on all its members.

    Cost: recursive doubling, log2 S messages of n; or reduce-scatter and allgather,
    2 ceil(log2 S) messages and 2 n (S - 1) / S elements.
    """
    size = comm.world_size
    hops = (size - 1).bit_length()
    more = vector.numel() * vector.element_size() * (hops - 2 * (size - 1) / size)
    if size & (size - 1) or more * _BETA > hops * _ALPHA:
        return await comm.allreduce(vector, "average")
    framing = Raw("value")
    for hop in range(hops):
        partner = comm.rank ^ (1 << hop)
        payload = vector.contiguous().view(torch.uint8)
        receiving = comm.irecv(partner, payload.numel(), "average", framing)
        sending = comm.isend(payload, partner, "average", framing)
        raw: Tensor = await receiving
        await sending
        theirs = raw.clone().view(vector.dtype)  # a body may start at any byte
        vector = vector + theirs if comm.rank < partner else theirs + vector
    return vector
