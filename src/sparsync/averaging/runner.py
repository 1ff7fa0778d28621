"""Rounds one after the other: their mail, the one under way, and what came of the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from sparsync.averaging.rounds import Delivery, GroupComm, Header, Kind, Round, Rounds
from sparsync.transports.base import Operation

__all__ = ["Attempt", "Runner"]

Post = Callable[[int, Header, Tensor | None], None]


@dataclass
class Attempt:
    """A round under way among those that were present when it began.

    Attributes:
        members: of the group.
        contributed: version of the model that this rank put in.
        program: the group's collective.
        waits_for: the message that it needs next.
        since: when it began to wait for it.
    """

    members: list[int]
    contributed: int
    program: Coroutine[Operation, None, Tensor]
    waits_for: Delivery | None = None
    since: float = 0.0


@final
class Runner:
    """Executes rounds in the order of their versions, each once.

    Args:
        rounds: what they are.
        first: number of the first one.
        model: stands for the result of a synchronous round before the first.
        post: sends a message to a rank.

    Attributes:
        version: number of the round to execute next.
        done: number of the last round executed.
        attempt: the round under way.
        last: result of the last round.
        kept: result of the last round for which all waited.
    """

    def __init__(self, rounds: Rounds, first: int, model: Tensor, post: Post) -> None:
        self.rounds = rounds
        self.version, self.done = first, first - 1
        self.attempt: Attempt | None = None
        self.last: Round | None = None
        self.kept = Round(first - 1, model, 1, first - 1)
        self._post = post
        self._mail: dict[tuple[int, int], dict[int, deque[Tensor]]] = {}

    def deliver(self, source: int, header: Header, body: Tensor) -> None:
        """Keep a message of a round until that asks for it."""
        box = self._mail.setdefault((header.version, header.view), {})
        box.setdefault(source, deque()).append(body)

    def whole(self, version: int) -> bool:
        """Tell whether all ranks wait for each other in a round."""
        return version % 2 == 0 or self.rounds.synchronous(version)

    def begin(self, present: Sequence[int], rank: int, view: int) -> None:
        """Begin the next round among those present."""
        version = self.version
        everyone = version % 2 == 0
        members = list(present if everyone else self.rounds.members(version, present, rank))

        def post(dest: int, body: Tensor) -> None:
            self._post(dest, Header(Kind.DATA, 0, version, view), body)

        comm = GroupComm(members, rank, post, self._mail.setdefault((version, view), {}))
        program = self.rounds.reduce(comm, self.rounds.contribution(version))
        self.attempt = Attempt(members, self.rounds.published, program)

    def run(self, now: float) -> Round | None:
        """Run the round as far as it comes; return its result, if it ends."""
        attempt = self.attempt
        assert attempt is not None, "begun"
        while attempt.waits_for is None or attempt.waits_for.poll():
            try:
                awaited: Any = attempt.program.send(None)
            except StopIteration as stop:
                models = len(attempt.members)
                return Round(self.version, stop.value, models, attempt.contributed)
            attempt.waits_for, attempt.since = awaited, now
        return None

    def end(self, result: Round) -> None:
        """Take a round's result, its own or another rank's, and go on to the next."""
        self.drop()
        self.rounds.end(result)
        if self.whole(result.version):
            self.kept = result
        self.last, self.done = result, result.version
        self.version = self.rounds.following(result.version)
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] > self.done}

    def drop(self) -> None:
        """Give up the round under way; it may begin anew."""
        if self.attempt is not None:
            self.attempt.program.close()
            self.attempt = None

    def jump(self, version: int, total: Tensor, models: int) -> Tensor:
        """Go on with a later round from a given result; return the mean of that."""
        self.drop()
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] >= version}
        self.version, self.done = version, version - 1
        self.last = self.kept = Round(self.done, total, models, self.done)
        model = total / models
        self.rounds.restart(self.done, model)
        return model
