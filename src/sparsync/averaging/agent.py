"""The agent of a rank: it executes rounds of averaging whatever the rank itself is computing.

Rounds have version numbers and are executed in order, each once.  A round begins on a rank when the
rank arrives at it, or when word comes that another has: word travels down the binomial tree whose
root is the activator, and with the round's own messages.  Nothing here knows threads or sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from sparsync.averaging.membership import Membership
from sparsync.averaging.rounds import (
    Delivery,
    GroupComm,
    Header,
    Kind,
    Round,
    Rounds,
    step_of,
)
from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.actors import Actor, Signal
from sparsync.transports.base import Operation
from sparsync.transports.ledger import Ledger, Parts, Traffic

__all__ = ["Agent", "Answer", "Welcome", "tree_children"]


def tree_children(rank: int, root: int, world_size: int) -> list[int]:
    """Return whom a rank forwards to in the binomial tree of ``root``, nearest first.

    Example:
        >>> tree_children(1, 1, 4), tree_children(2, 1, 4), tree_children(3, 1, 4)
        ([2, 3], [0], [])
    """
    place = (rank - root) % world_size
    first = place.bit_length()
    hops = [1 << i for i in range(first, world_size.bit_length())]
    return [(rank + hop) % world_size for hop in hops if place + hop < world_size]


class Welcome(NamedTuple):
    """What a rank that was left out is given when it comes back: go on with this step and model."""

    step: int
    model: Tensor


class Answer(NamedTuple):
    """What a rank gets when it arrives.

    Attributes:
        came: the newest round, or a welcome.
        traffic: of the agent since the last answer.
        left_out: see ``Agent``.
    """

    came: Round | Welcome | None
    traffic: Traffic
    left_out: tuple[tuple[int, int, str], ...]


@dataclass
class _Attempt:
    """A round under way among those that were present when it began."""

    members: list[int]
    contributed: int
    program: Coroutine[Operation, None, Tensor]
    waits_for: Delivery | None = None
    since: float = 0.0


@dataclass
class _Arrival:
    """A rank that waits for its round."""

    version: int
    signal: Signal


@final
class Agent(Actor):
    """Executes the rounds of one rank.

    Args:
        rounds: what they are.
        first: number of the first one.
        model: what a rank is given that comes back before the first synchronous round.
        deadline: seconds of silence, while others need it, after which a rank is left out; None: it
            is waited for.

    Attributes:
        version: number of the round to execute next.
        done: number of the last round executed.
        left_out: ranks that were left out: step and reason, in order.
        ledger: of this agent's messages; taken over by the rank when it arrives.
    """

    def __init__(
        self, rounds: Rounds, first: int, model: Tensor, deadline: float | None = None
    ) -> None:
        self.rounds, self.deadline = rounds, deadline
        self.version, self.done = first, first - 1
        self.left_out: list[tuple[int, int, str]] = []
        self.ledger = Ledger()
        self._arrived = self._called = first - 1
        self._waiting: _Arrival | None = None
        self._attempt: _Attempt | None = None
        self._mail: dict[tuple[int, int], dict[int, deque[Tensor]]] = {}
        self._told: dict[int, set[int]] = {}  # version -> whom this rank has told
        self._last: Round | None = None
        self._kept = Round(first - 1, model, 1, first - 1)  # of the last synchronous round
        self._welcome: Welcome | None = None
        self._members: Membership | None = None

    @property
    def membership(self) -> Membership:
        """Who is present, and who was heard of when."""
        if self._members is None:
            self._members = Membership(self.port.world_size, self.port.now)
        return self._members

    # ---- the rank's calls -------------------------------------------------------------------------

    def arrive(self, version: int, vector: Tensor, signal: Signal) -> None:
        """Take this rank's model; ``signal`` gets the newest round >= ``version``, or a ``Welcome``."""
        if self._welcome is not None:
            welcome, self._welcome = self._welcome, None
            signal.set(self._answer(welcome))
            return
        self.rounds.publish(version, vector)
        if version <= self.done:
            signal.set(self._answer(self._last))
            return
        self._arrived, self._waiting = version, _Arrival(version, signal)
        if version < self.version:  # ``finish``: the round before the next one of a step
            self.version = version
        alone = self.rounds.synchronous(version) or self._called >= version
        if not alone and self.rounds.activates(version, self.port.rank):
            self._called = version
            self._tell(version, self.port.rank)
        self._advance()

    # ---- messages ---------------------------------------------------------------------------------

    def receive(self, source: int, payload: Tensor) -> None:
        """Take a message."""
        header, body = Header.cut(payload)
        self.ledger.received("average", payload.numel())
        self.membership.hear(source, self.port.now)
        if not self.membership.is_present(source):
            self._readmit(source)
            return
        if header.kind == Kind.ACTIVATE:
            self._on_activate(header)
        elif header.kind == Kind.DATA:
            self._on_data(source, header, body)
        elif header.kind == Kind.RESULT:
            self._on_result(header, body)
        elif header.kind == Kind.PING:
            self._post(source, Header(Kind.PONG, 0, self.version, 0))
        elif header.kind == Kind.VIEW:
            self._merge(body.clone().view(torch.int64).tolist())
        elif header.kind == Kind.WELCOME:
            self._on_welcome(header, body)

    def _on_activate(self, header: Header) -> None:
        self._tell(header.version, header.number)  # also of a round that this rank has ended
        if header.version > self._called:
            self._called = header.version
            self._advance()

    def _on_data(self, source: int, header: Header, body: Tensor) -> None:
        if header.version <= self.done:  # the sender begins a round anew that has ended here
            self._repeat(source, header.version)
            return
        key = header.version, header.view
        self._mail.setdefault(key, {}).setdefault(source, deque()).append(body)
        self._called = max(self._called, header.version)
        self._advance()

    def _answer(self, came: Round | Welcome | None) -> Answer:
        traffic, self.ledger = self.ledger.total(), Ledger()
        return Answer(came, traffic, tuple(self.left_out))

    def _repeat(self, source: int, version: int) -> None:
        result = self._kept if self._kept.version == version else self._last
        if result is not None:
            header = Header(Kind.RESULT, result.models, version, 0)
            self._post(source, header, result.total)

    def _on_result(self, header: Header, body: Tensor) -> None:
        if header.version == self.version and self._attempt is not None:
            total = body.clone().view(self._kept.total.dtype)
            mine = self._attempt.contributed
            self._end(Round(header.version, total, header.number, mine))
            self._advance()

    # ---- rounds -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Execute rounds as far as they come."""
        while True:
            if self._attempt is None:
                if not self._may_begin():
                    break
                self._begin()
            if not self._drive():
                break
        self._plan_tick()

    def _may_begin(self) -> bool:
        version = self.version
        if not self.membership.is_present(self.port.rank):
            return False
        if version % 2 == 0 or self.rounds.synchronous(version):
            return self._arrived >= version
        return max(self._arrived, self._called) >= version

    def _begin(self) -> None:
        version, view = self.version, self.membership.view
        present, rank = self.membership.present, self.port.rank
        whole = version % 2 == 0
        members = list(present if whole else self.rounds.members(version, present, rank))
        mail = self._mail.setdefault((version, view), {})

        def post(dest: int, body: Tensor) -> None:
            self._post(dest, Header(Kind.DATA, 0, version, view), body)

        comm = GroupComm(members, rank, post, mail)
        program = self.rounds.reduce(comm, self.rounds.contribution(version))
        self._attempt = _Attempt(members, self.rounds.published, program)

    def _drive(self) -> bool:
        """Run the round as far as it comes; tell whether it ended."""
        attempt = self._attempt
        assert attempt is not None
        if attempt.waits_for is not None and not attempt.waits_for.poll():
            return False
        try:
            awaited: Any = attempt.program.send(None)
        except StopIteration as stop:
            count = len(attempt.members)
            self._end(Round(self.version, stop.value, count, attempt.contributed))
            return True
        attempt.waits_for, attempt.since = awaited, self.port.now
        return False if not awaited.poll() else self._drive()

    def _end(self, result: Round) -> None:
        version = result.version
        self._drop_attempt()
        if version % 2 == 0 or self.rounds.synchronous(version):
            self._kept = result
        self._last, self.done = result, version
        self.version = self.rounds.following(version)
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] > version}
        self._told = {v: told for v, told in self._told.items() if v > version - 64}
        if self._waiting is not None and version >= self._waiting.version:
            waiting, self._waiting = self._waiting, None
            waiting.signal.set(self._answer(result))

    def _drop_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.program.close()
            self._attempt = None

    def _tell(self, version: int, root: int) -> None:
        """Pass the word on down the tree of ``root``, to whom this rank has not told yet."""
        told = self._told.setdefault(version, set())
        pending = tree_children(self.port.rank, root, self.port.world_size)
        while pending:
            child = pending.pop(0)
            if child in told or child == self.port.rank:
                continue
            told.add(child)
            if self.membership.is_present(child):
                self._post(child, Header(Kind.ACTIVATE, root, version, 0))
            else:  # speak for it
                pending += tree_children(child, root, self.port.world_size)

    # ---- who is present ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Ask a rank that keeps this one waiting whether it is there; leave it out if it is silent."""
        now, due = self.port.now, self.due
        attempt, deadline = self._attempt, self.deadline
        self.due = None
        if attempt is None or attempt.waits_for is None or deadline is None:
            return
        if due is not None and now - due > deadline / 4:  # this rank was away itself
            self.membership.forgive(now)
            attempt.since = now
        peer = attempt.waits_for.source
        since = max(attempt.since, self.membership.heard[peer])  # compared as ``_plan_tick`` adds
        if now >= since + deadline:
            self._leave_out(peer, f"it was silent for {deadline:g} s")
            return
        if now >= since + deadline / 2:
            self._post(peer, Header(Kind.PING, 0, self.version, 0))
        self._plan_tick()

    def _plan_tick(self) -> None:
        attempt, deadline = self._attempt, self.deadline
        self.due = None
        if attempt is None or attempt.waits_for is None:
            return
        peer = attempt.waits_for.source
        if peer in self.membership.gone:
            self._leave_out(peer, self.membership.gone[peer])
            return
        if deadline is None:
            return
        since = max(attempt.since, self.membership.heard[attempt.waits_for.source])
        half = since + deadline / 2
        self.due = half if self.port.now < half else since + deadline

    def lose(self, peer: int, reason: str) -> None:
        """Leave a rank out that is gone for ever; without a deadline, fail once it is waited for."""
        self.membership.gone[peer] = reason
        if self.deadline is None or not self.port.survives:
            self._plan_tick()
        elif self.membership.is_present(peer):
            self._leave_out(peer, reason)

    def _leave_out(self, peer: int, reason: str) -> None:
        step = step_of(self.version)
        what = f"rank {peer} left out at step {step}: {reason}"
        if self.deadline is None or not self.port.survives:
            kind = DeadlineError if "silent" in reason else PeerError
            raise kind(f"rank {self.port.rank}, phase 'average': {what}")
        self.left_out.append((peer, step, reason))
        self._merge(self.membership.toggled(peer))

    def _readmit(self, peer: int) -> None:
        """Welcome a rank that was left out and has spoken: it gets the last common model."""
        if peer in self.membership.gone:
            return
        self._merge(self.membership.toggled(peer))
        header = Header(Kind.WELCOME, self._kept.models, self.version, 0)
        generations = torch.tensor(self.membership.generations)
        self._post(peer, header, torch.cat([_bytes(generations), _bytes(self._kept.total)]))

    def _merge(self, generations: list[int]) -> None:
        """Take over what is news about who is present; a round under way begins anew among them."""
        if not self.membership.merge(generations):
            return
        news = torch.tensor(self.membership.generations)
        for peer in self.membership.present:
            if peer != self.port.rank:
                self._post(peer, Header(Kind.VIEW, 0, self.version, 0), news)
        self._drop_attempt()
        if not self.membership.is_present(self.port.rank):
            for peer in self.membership.present:  # any word makes them readmit this rank
                self._post(peer, Header(Kind.PING, 0, self.version, 0))
        self._advance()

    def _on_welcome(self, header: Header, body: Tensor) -> None:
        """Go on where the others are."""
        cut = 8 * self.port.world_size
        generations = body[:cut].clone().view(torch.int64).tolist()
        if header.version <= self.version and self.membership.is_present(self.port.rank):
            self._merge(generations)
            return
        total = body[cut:].clone().view(self._kept.total.dtype)
        self._drop_attempt()
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] >= header.version}
        self.version, self.done = header.version, header.version - 1
        self._arrived = self.done
        self._last = self._kept = Round(self.done, total, header.number, self.done)
        model = total / header.number
        self.rounds.publish(self.done, model)
        welcome = Welcome(step_of(header.version), model)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.signal.set(self._answer(welcome))
        else:
            self._welcome = welcome
        self._merge(generations)
        self._advance()

    def _post(self, dest: int, header: Header, body: Tensor | None = None) -> None:
        message = header.join(body)
        values = 0 if body is None else message.numel() - 24
        parts = Parts(header=message.numel() - values, value=values)
        self.ledger.sent("average", message.numel(), parts)
        self.port.send(dest, message)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
