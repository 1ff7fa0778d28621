"""The agent of a rank: executes rounds of averaging whatever the rank itself is computing.

Rounds have version numbers and are executed in order, each once.  A round begins on a rank when the
rank arrives at it, or when it learns that another has: word travels down the binomial tree whose root
is the activator, and with the round's own messages.  What a round computes is a ``Rounds``; nothing
here knows threads or sockets.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import PeerError
from sparsync.transports.actors import Actor, Reply
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Finished, Operation
from sparsync.transports.ledger import Framing, Ledger, Parts

__all__ = [
    "Agent",
    "Answer",
    "Header",
    "Kind",
    "Round",
    "Rounds",
    "Welcome",
    "round_of",
    "step_of",
    "tree_children",
]

_LAYOUT: Final = struct.Struct("<IIqQ")
_REMEMBERED: Final = 64  # versions for which an agent knows whom it has told of them


def round_of(step: int) -> int:
    """Return the version of the average after a 0-based step; the even one before it is ``finish``'s.

    Example:
        >>> [round_of(step) for step in range(3)], step_of(5)
        ([1, 3, 5], 2)
    """
    return 2 * step + 1


def step_of(version: int) -> int:
    """Return the step that a round belongs to."""
    return version // 2


def tree_children(rank: int, root: int, world_size: int) -> list[int]:
    """Return the ranks that a rank forwards to in the binomial tree of ``root``, nearest first.

    Example:
        >>> tree_children(1, 1, 4), tree_children(2, 1, 4), tree_children(3, 1, 4)
        ([2, 3], [0], [])
    """
    place = (rank - root) % world_size
    hops = [1 << i for i in range(place.bit_length(), world_size.bit_length())]
    return [(rank + hop) % world_size for hop in hops if place + hop < world_size]


# ---- messages and answers -------------------------------------------------------------------------


class Kind:
    """The kinds of messages between agents."""

    ACTIVATE: Final = 1  # a round has begun; number: the activator
    DATA: Final = 2  # of a round's collective
    RESULT: Final = 3  # of a round that the receiver has not ended; number: models in the sum
    PING: Final = 4  # are you there?
    PONG: Final = 5
    VIEW: Final = 6  # who is present
    WELCOME: Final = 7  # to one that was left out: where the others are, and their model


class Header(NamedTuple):
    """The 24 bytes before every message between agents, so that values after them are aligned.

    Attributes:
        kind: one of ``Kind``.
        number: see there.
        version: number of the round.
        view: fingerprint of who takes part, as the sender sees it.

    Example:
        >>> raw = Header(Kind.PING, 0, 7, 0).join(None)
        >>> Header.cut(raw)[0].version, raw.numel()
        (7, 24)
    """

    kind: int
    number: int
    version: int
    view: int

    def join(self, body: Tensor | None) -> Tensor:
        """Return header and body as one message."""
        head = torch.frombuffer(bytearray(_LAYOUT.pack(*self)), dtype=torch.uint8)
        return head if body is None else torch.cat([head, body.contiguous().view(torch.uint8)])

    @classmethod
    def cut(cls, message: Tensor) -> tuple[Header, Tensor]:
        """Return the header and the body (a view)."""
        head, body = message[: _LAYOUT.size], message[_LAYOUT.size :]
        return cls(*_LAYOUT.unpack(bytes(head.tolist()))), body


class Round(NamedTuple):
    """The result of a round.

    Attributes:
        version: its number.
        total: sum of the models.
        models: number of models in the sum.
        contributed: version of the model that this rank put in; older than ``version``: a stale one.
    """

    version: int
    total: Tensor
    models: int
    contributed: int


class Welcome(NamedTuple):
    """Where a rank that was left out goes on when it comes back."""

    step: int
    model: Tensor


class Answer(NamedTuple):
    """The answer to a rank that arrives at a round.

    Attributes:
        result: the newest round, or a welcome.
        traffic: the agent's messages since the last answer.
        left_out: rank, step and reason of all ranks left out so far.
        present: ranks that take part, ascending.
    """

    result: Round | Welcome
    traffic: Ledger
    left_out: tuple[tuple[int, int, str], ...]
    present: list[int]


# ---- rounds ---------------------------------------------------------------------------------------


class Rounds(ABC):
    """The rounds of an algorithm; the agent calls, one call at a time.

    Attributes:
        published: version of what ``contribution`` returns.
    """

    published: int

    def following(self, version: int) -> int:
        """Return the number of the next round after ``version`` that belongs to a step."""
        return round_of(step_of(version) + version % 2)

    @abstractmethod
    def synchronous(self, version: int) -> bool:
        """Tell whether a rank takes part only when it has arrived itself."""

    def activates(self, version: int, rank: int) -> bool:
        """Tell whether this rank's arrival starts the round for all: by default any rank's does."""
        return True

    def members(self, version: int, present: Sequence[int], rank: int) -> Sequence[int]:
        """Return this rank's group among those present, ascending: by default all of them."""
        return present

    @abstractmethod
    def publish(self, version: int, vector: Tensor) -> None:
        """Take what this rank contributes from now on."""

    def restart(self, version: int, model: Tensor) -> None:
        """Begin after ``version`` with a model that all ranks have."""
        self.publish(version, model)

    @abstractmethod
    def contribution(self, version: int) -> Tensor:
        """Return what this rank contributes; a round that is begun again asks again."""

    def end(self, result: Round) -> None:  # noqa: B027 (most keep nothing)
        """Take a round's result."""

    def collected(self, newest: Round) -> Round:
        """Return the answer to a rank that arrives: by default the newest round."""
        return newest

    @abstractmethod
    def reduce(self, comm: Communicator, vector: Tensor) -> Coroutine[Operation, None, Tensor]:
        """Sum vectors over a group."""


Mail = dict[int, deque[Tensor]]  # by source


@final
class _GroupComm(Communicator):
    """The members of a group as a communicator, over the messages of their agents."""

    def __init__(
        self, members: list[int], rank: int, post: Callable[[int, Tensor], None], mail: Mail
    ) -> None:
        super().__init__(members.index(rank), len(members), torch.device("cpu"))
        self.members, self.post, self.mail = members, post, mail

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        self.post(self.members[dest], payload)
        return Finished()

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        return _Delivery(self.mail, self.members[source])


@final
class _Delivery(Operation):
    """A message that a group's collective waits for."""

    def __init__(self, mail: Mail, source: int) -> None:
        self.mail, self.source = mail, source

    def poll(self, seconds: float = 0.0) -> bool:
        if not self.done and self.mail.get(self.source):
            self.result, self.done = self.mail[self.source].popleft(), True
        return self.done

    def wait(self) -> None:
        raise AssertionError("an agent does not block; it resumes what awaits this")

    def __await__(self) -> Any:
        while not self.poll():
            yield self
        return self.result


@dataclass
class _Attempt:
    """A round under way among those that were present when it began."""

    models: int  # in its sum
    contributed: int  # version of the model that this rank put in
    program: Coroutine[Operation, None, Tensor]
    waits_for: _Delivery | None = None
    since: float = 0.0  # when it began to wait for that


# ---- the agent ------------------------------------------------------------------------------------


@final
class Agent(Actor):
    """Executes the rounds of one rank.

    Who is present is a generation per rank, even while it takes part and odd while it is left out.
    Generations only grow, so all ranks reach the same view by the same merges, whatever the order of
    the news.

    Args:
        rounds: what they compute.
        step: of the first local step.
        model: given to a rank that comes back before the first synchronous round.
        deadline: seconds of silence, while others need it, after which a rank is left out; None: it
            is waited for.

    Attributes:
        version: number of the round to execute next.
        left_out: rank, step and reason, in order.
        ledger: of this agent's messages; taken over by the rank when it arrives.
    """

    def __init__(
        self, rounds: Rounds, step: int, model: Tensor, deadline: float | None = None
    ) -> None:
        self.rounds, self.deadline = rounds, deadline
        self.version, done = rounds.following(2 * step), 2 * step
        self.left_out: list[tuple[int, int, str]] = []
        self.ledger = Ledger()
        self._attempt: _Attempt | None = None
        self._last = self._common = Round(done, model, 1, done)  # common: all waited for it
        self._mail: dict[tuple[int, int], Mail] = {}  # by version and view
        self._arrived = self._called = self.version - 1
        self._waiting: tuple[int, Reply] | None = None  # version, and what waits for it
        self._told: dict[int, set[int]] = {}  # version -> whom this rank has told
        self._welcome: Welcome | None = None
        self._generations: list[int] = []  # as long as the world once somebody was left out
        self._view = 0  # a fingerprint of the generations; 0 while nobody was ever left out
        self._heard: dict[int, float] = {}
        self._gone: dict[int, str] = {}  # ranks that cannot come back, and why

    @property
    def present(self) -> list[int]:
        """The ranks that take part, ascending."""
        return [rank for rank in range(self.host.world_size) if self._is_present(rank)]

    def _is_present(self, rank: int) -> bool:
        return not self._generations or self._generations[rank] % 2 == 0

    # ---- the rank's calls

    def arrive(self, version: int, vector: Tensor, reply: Reply) -> None:
        """Take this rank's model; ``reply`` gets the newest round >= ``version``, or a ``Welcome``."""
        if self._welcome is not None:
            welcome, self._welcome = self._welcome, None
            reply(self._answer(welcome))
            return
        self.rounds.publish(version, vector)
        if version <= self._last.version:
            reply(self._answer(self._last))
            return
        self._arrived, self._waiting = version, (version, reply)
        self.version = min(self.version, version)  # ``finish``: the round before a step's
        alone = self._waits_for_all(version) or self._called >= version
        if not alone and self.rounds.activates(version, self.host.rank):
            self._called = version
            self._tell(version, self.host.rank)
        self._advance()

    def _answer(self, result: Round | Welcome) -> Answer:
        traffic, self.ledger = self.ledger, Ledger()
        if isinstance(result, Round):
            result = self.rounds.collected(result)
        return Answer(result, traffic, tuple(self.left_out), self.present)

    def _release(self, result: Round | Welcome) -> None:
        if self._waiting is not None:
            (_, reply), self._waiting = self._waiting, None
            reply(self._answer(result))

    # ---- messages

    def receive(self, source: int, payload: Tensor) -> None:
        """Take a message."""
        header, body = Header.cut(payload)
        self.ledger.received("average", payload.numel())
        self._heard[source] = self.host.now
        if not self._is_present(source):
            self._readmit(source)
        elif header.kind == Kind.ACTIVATE:
            self._on_activate(header)
        elif header.kind == Kind.DATA:
            self._on_data(source, header, body)
        elif header.kind == Kind.RESULT:
            self._on_result(header, body)
        elif header.kind == Kind.PING:
            self._post(source, Header(Kind.PONG, 0, self.version, 0))
            if header.version <= self._last.version:  # it waits in a round that has ended here
                self._repeat(source, header.version)
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
        if header.version <= self._last.version:  # begun again by the sender, ended here
            self._repeat(source, header.version)
            return
        mail = self._mail.setdefault((header.version, header.view), {})
        mail.setdefault(source, deque()).append(body)
        self._called = max(self._called, header.version)
        self._advance()

    def _repeat(self, source: int, version: int) -> None:
        """Send the result of a round that has ended here, or of a later one."""
        result = self._common if self._common.version == version else self._last
        self._post(source, Header(Kind.RESULT, result.models, version, 0), result.total)

    def _on_result(self, header: Header, body: Tensor) -> None:
        if header.version == self.version and self._attempt is not None:
            total = body.clone().view(self._common.total.dtype)
            self._end(Round(header.version, total, header.number, self._attempt.contributed))
            self._advance()

    def _tell(self, version: int, root: int) -> None:
        """Pass the word on down the tree of ``root``, to whom this rank has not told yet."""
        told = self._told.setdefault(version, set())
        pending = tree_children(self.host.rank, root, self.host.world_size)
        while pending:
            child = pending.pop(0)
            if child in told or child == self.host.rank:
                continue
            told.add(child)
            if self._is_present(child):
                self._post(child, Header(Kind.ACTIVATE, root, version, 0))
            else:  # speak for it
                pending += tree_children(child, root, self.host.world_size)

    def _post(self, dest: int, header: Header, body: Tensor | None = None) -> None:
        message = header.join(body)
        values = message.numel() - _LAYOUT.size
        self.ledger.sent("average", message.numel(), Parts(header=_LAYOUT.size, value=values))
        self.host.send(dest, message)

    # ---- rounds

    def _waits_for_all(self, version: int) -> bool:
        return version % 2 == 0 or self.rounds.synchronous(version)

    def _advance(self) -> None:
        """Execute rounds as far as possible without waiting."""
        while self._attempt is not None or self._may_begin():
            if self._attempt is None:
                self._begin()
            result = self._run()
            if result is None:
                break
            self._end(result)
        self._plan_tick()

    def _may_begin(self) -> bool:
        if not self._is_present(self.host.rank):
            return False
        whole = self._waits_for_all(self.version)
        return (self._arrived if whole else self._called) >= self.version

    def _begin(self) -> None:
        version, view, present = self.version, self._view, self.present
        everyone = version % 2 == 0
        members = present if everyone else self.rounds.members(version, present, self.host.rank)

        def post(dest: int, body: Tensor) -> None:
            self._post(dest, Header(Kind.DATA, 0, version, view), body)

        mail = self._mail.setdefault((version, view), {})
        comm = _GroupComm(list(members), self.host.rank, post, mail)
        program = self.rounds.reduce(comm, self.rounds.contribution(version))
        self._attempt = _Attempt(len(members), self.rounds.published, program)

    def _run(self) -> Round | None:
        """Run the round until it waits; return its result, if it ends."""
        attempt = self._attempt
        assert attempt is not None, "begun"
        while attempt.waits_for is None or attempt.waits_for.poll():
            try:
                awaited: Any = attempt.program.send(None)
            except StopIteration as stop:
                return Round(self.version, stop.value, attempt.models, attempt.contributed)
            attempt.waits_for, attempt.since = awaited, self.host.now
        return None

    def _end(self, result: Round) -> None:
        """Take a round's result, its own or another rank's, and go on to the next."""
        self._drop()
        self.rounds.end(result)
        if self._waits_for_all(result.version):
            self._common = result
        self._last = result
        self.version = self.rounds.following(result.version)
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] > result.version}
        self._told = {v: told for v, told in self._told.items() if v > result.version - _REMEMBERED}
        if self._waiting is not None and result.version >= self._waiting[0]:
            self._release(result)

    def _drop(self) -> None:
        """Give up the round under way; it may be begun again."""
        if self._attempt is not None:
            self._attempt.program.close()
            self._attempt = None

    # ---- who is present

    def _silent_since(self, attempt: _Attempt, peer: int) -> float:
        return max(attempt.since, self._heard.get(peer, attempt.since))

    def tick(self) -> None:
        """Ask a rank that keeps this one waiting whether it is there; leave it out if it is silent."""
        now, due = self.host.now, self.due
        attempt, deadline = self._attempt, self.deadline
        self.due = None
        if attempt is None or attempt.waits_for is None or deadline is None:
            return
        if due is not None and now - due > deadline / 4:  # this rank was away itself
            attempt.since = now
        peer = attempt.waits_for.source
        since = self._silent_since(attempt, peer)  # compared as ``_plan_tick`` adds
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
        if peer in self._gone:
            self._leave_out(peer, self._gone[peer])
        elif deadline is not None:
            since = self._silent_since(attempt, peer)
            half = since + deadline / 2
            self.due = half if self.host.now < half else since + deadline

    def lose(self, peer: int, reason: str) -> None:
        """Leave a rank out that is gone for ever; without a deadline, fail once it is waited for."""
        self._gone[peer] = reason
        if self.deadline is None:
            self._plan_tick()
        elif self._is_present(peer):
            self._leave_out(peer, reason)

    def _leave_out(self, peer: int, reason: str) -> None:
        if self.deadline is None:
            where = f"rank {self.host.rank}, step {step_of(self.version)}, phase 'average'"
            raise PeerError(f"{where}: rank {peer}: {reason}")
        self._merge(self._toggled(peer), reason)

    def _toggled(self, peer: int) -> list[int]:
        """Return the generations with one rank left out, or back."""
        generations = self._generations or [0] * self.host.world_size
        return [g + (rank == peer) for rank, g in enumerate(generations)]

    def _readmit(self, peer: int) -> None:
        """Welcome a rank that was left out and has spoken: it gets the last common model."""
        if peer in self._gone:
            return
        self._merge(self._toggled(peer))
        header = Header(Kind.WELCOME, self._common.models, self.version, 0)
        parts = torch.tensor(self._generations), self._common.total.contiguous()
        self._post(peer, header, torch.cat([part.view(torch.uint8) for part in parts]))

    def _merge(self, generations: list[int], reason: str = "other ranks say so") -> None:
        """Take over news about who is present; a round under way is begun again among them."""
        known = self._generations or [0] * self.host.world_size
        newer = [max(pair) for pair in zip(known, generations, strict=True)]
        if newer == known:
            return
        before = set(self.present) - {self.host.rank}
        self._generations = newer
        digest = hashlib.blake2b(repr(newer).encode(), digest_size=8)
        self._view = int.from_bytes(digest.digest(), "little")
        step, present = step_of(self.version), self.present
        self.left_out += [(peer, step, reason) for peer in sorted(before - set(present))]
        for peer in present:
            if peer != self.host.rank:
                self._post(peer, Header(Kind.VIEW, 0, self.version, 0), torch.tensor(newer))
        self._drop()
        if not self._is_present(self.host.rank):
            for peer in present:  # any word makes them readmit this rank
                self._post(peer, Header(Kind.PING, 0, self.version, 0))
        self._advance()

    def _on_welcome(self, header: Header, body: Tensor) -> None:
        """Go on where the others are."""
        cut = 8 * self.host.world_size
        generations = body[:cut].clone().view(torch.int64).tolist()
        version = header.version
        if version <= self.version and self._is_present(self.host.rank):
            self._merge(generations)
            return
        self._drop()
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] >= version}
        total = body[cut:].clone().view(self._common.total.dtype)
        self.version, self._arrived = version, version - 1
        self._last = self._common = Round(version - 1, total, header.number, version - 1)
        model = total / header.number
        self.rounds.restart(version - 1, model)
        welcome = Welcome(step_of(version), model)
        if self._waiting is None:
            self._welcome = welcome
        self._release(welcome)
        self._merge(generations)
        self._advance()
