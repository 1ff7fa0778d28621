"""An agent executes rounds of averaging for its rank, while the rank itself computes.

Rounds have version numbers and are executed in order, once each.  A round starts on a rank when the rank
arrives at it, or when its agent receives a message which shows that a rank has arrived.  Activation
messages spread along a binomial tree from the activator, the rank that starts the round; the round's own
messages have the same effect.  A ``Rounds`` object computes the result of a round.  This module is
independent of threads and sockets.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, cast, final

import torch
from torch import Tensor

from sparsync.averaging.averager import Companion, open_message, values_in
from sparsync.errors import PeerError
from sparsync.transports.actors import Reply
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.transports.driver import Finished, Operation, Task
from sparsync.transports.groups import Subgroup
from sparsync.transports.ledger import Framing

__all__ = [
    "Agent",
    "Answer",
    "Header",
    "Kind",
    "Round",
    "Rounds",
    "finish_of",
    "is_finish",
    "round_of",
    "step_of",
    "tree_children",
]

_LAYOUT: Final = struct.Struct("<IIqQ")
# number of versions per step: the last one is the step's round, the rest are for calls of ``finish``
_VERSIONS: Final = 1 << 20
# for how many versions an agent remembers to which ranks it has forwarded an activation
_REMEMBERED: Final = 32 * _VERSIONS


def round_of(step: int) -> int:
    """Return the version of the average after a 0-based step.

    Example:
        >>> step_of(round_of(2)), round_of(2) < finish_of(3, before=-1) < round_of(3)
        (2, True)
    """
    return step * _VERSIONS + _VERSIONS - 1


def finish_of(step: int, before: int) -> int:
    """Return the version of a ``finish`` before a step's round, given the version of the previous one.

    Example:
        >>> first = finish_of(3, before=-1)
        >>> finish_of(3, first) == first + 1, is_finish(first), is_finish(round_of(3))
        (True, True, False)
    """
    return max(step * _VERSIONS, before + 1)


def is_finish(version: int) -> bool:
    """Return whether a version belongs to a ``finish``, not to a step's round."""
    return version != round_of(step_of(version))


def step_of(version: int) -> int:
    """Return the step to which a round belongs."""
    return version // _VERSIONS


def tree_children(rank: int, root: int, world_size: int) -> list[int]:
    """Return a rank's children in the binomial tree that starts at ``root``, nearest first.

    Example:
        >>> tree_children(1, 1, 4), tree_children(2, 1, 4), tree_children(3, 1, 4)
        ([2, 3], [0], [])
    """
    place = (rank - root) % world_size
    hops = [1 << i for i in range(place.bit_length(), world_size.bit_length())]
    return [(rank + hop) % world_size for hop in hops if place + hop < world_size]


# ---- messages, results, and the computation of a round --------------------------------------------


class Kind(IntEnum):
    """The kinds of messages between agents."""

    ACTIVATE = 1  # a round has begun; number: the activator
    DATA = 2  # a message of a round's collective
    RESULT = 3  # the result of a round that the receiver has not ended; number: models in the sum
    PING = 4  # asks whether the receiver is alive
    PONG = 5
    VIEW = 6  # which ranks are present
    # to a rank that was left out: the present ranks and the last common sum; number: models in the sum
    WELCOME = 7
    # ranks are in different calls; version: the ``finish``; number: local steps that other ranks have
    # done
    APART = 8


class Header(NamedTuple):
    """The 24 bytes before every message between agents; ``view`` identifies the set of present ranks."""

    kind: int
    number: int
    version: int
    view: int = 0

    def pack(self) -> bytes:
        """Return the header as bytes."""
        return _LAYOUT.pack(*self)

    @classmethod
    def cut(cls, message: Tensor) -> tuple[Header, Tensor]:
        """Return the header and the body (a view)."""
        fields, body = open_message(message, _LAYOUT)
        return cls(*fields), body


class Round(NamedTuple):
    """The result of a round."""

    version: int
    total: Tensor  # sum of the models
    models: int  # number of models in the sum
    contributed: int  # version of this rank's contribution; stale if older than the round's version


class Answer(NamedTuple):
    """The agent's answer to its rank, which has arrived at a round."""

    result: Round  # the newest result
    resumes: bool  # whether the rank was left out, and now resumes with this result
    left_out: tuple[tuple[int, int, str], ...]  # rank, step and reason for each
    present: list[int]  # the ranks that are present, ascending


class Rounds(ABC):
    """A scheme's rounds; by default, all ranks join, and the first to arrive starts a round."""

    def synchronous(self, version: int) -> bool:
        """Return whether a rank joins the round only after it has arrived itself."""
        return False

    def activates(self, version: int, rank: int) -> bool:
        """Return whether this rank's arrival starts the round for all ranks."""
        return True

    def members(self, version: int, present: Sequence[int], rank: int) -> Sequence[int]:
        """Return this rank's group among the present ranks, in ascending order."""
        return present

    @abstractmethod
    def publish(self, vector: Tensor) -> None:
        """Store the vector that this rank contributes from now on."""

    def restart(self, model: Tensor) -> None:
        """Publish a model that all ranks have; it replaces this rank's own model."""
        self.publish(model)

    @abstractmethod
    def reduce(
        self, comm: Communicator, version: int, contributed: int
    ) -> Coroutine[Operation, None, Tensor]:
        """Sum the contributions of a group's ranks; called again if a round is restarted."""

    def end(self, result: Round) -> None:  # noqa: B027 (most need nothing)
        """Process the result of a round."""

    def collected(self, newest: Round) -> Round:
        """Return the round to send to an arriving rank; by default, the newest one."""
        return newest


# ---- a round in progress --------------------------------------------------------------------------


@final
class _AgentComm(Communicator):
    """The communicator of a round's collective, which sends its messages between agents."""

    def __init__(self, agent: Agent, version: int, view: int) -> None:
        super().__init__(agent.host.rank, agent.host.world_size, torch.device("cpu"))
        self.agent, self.version, self.view = agent, version, view

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        self.agent.post(dest, Header(Kind.DATA, 0, self.version, self.view).pack(), payload)
        return Finished()

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        return _Delivery(source, self.agent.mail_of(self.version, self.view, source))


@final
class _Delivery(Operation):
    """A message that a round waits for."""

    def __init__(self, source: int, mail: deque[Tensor]) -> None:
        self.source, self.mail = source, mail

    def poll(self, seconds: float = 0.0) -> bool:
        if not self.done and self.mail:
            self.result, self.done = self.mail.popleft(), True
        return self.done

    def wait(self) -> None:
        raise AssertionError("an agent does not block; it resumes the program that awaits this")


@dataclass
class _Attempt:
    """An attempt at a round, among the ranks that were present when it started."""

    models: int  # number of models in its sum
    contributed: int  # version of this rank's contribution
    task: Task[Tensor]
    since: float  # time at which the attempt began to wait

    @property
    def waits_for(self) -> _Delivery:
        return cast(_Delivery, self.task.waits_for)


# ---- the agent ------------------------------------------------------------------------------------


@final
class Agent(Companion):
    """Executes the rounds of one rank.

    Each rank has a generation, which is even while the rank is present and odd while it is left out.
    Generations only grow, so by taking maxima, all ranks reach the same view, in whatever order messages
    arrive.

    Args:
        rounds: the computation of each round.
        world_size: number of ranks.
        step: the first local step.
        model: the first model to publish, also given to a rank that rejoins before the first synchronous
            round.
        deadline: if others wait for a rank, they leave it out after this many seconds of silence; None
            means never.
    """

    def __init__(
        self,
        rounds: Rounds,
        world_size: int,
        step: int,
        model: Tensor,
        deadline: float | None = None,
    ) -> None:
        super().__init__()
        self.rounds, self.deadline = rounds, deadline
        self.left_out: list[tuple[int, int, str]] = []
        self._attempt: _Attempt | None = None
        self._mail: dict[tuple[int, int, int], deque[Tensor]] = {}  # by version, view and source
        # the previous step's round counts as the last one, because a ``finish`` may come next
        before = round_of(step - 1)
        self._restart(Round(before, model, 1, before), round_of(step))
        rounds.publish(model)
        self._called = before
        self._waiting: tuple[int, Reply] | None = None  # a version, and the reply that waits for it
        self._told: dict[int, set[int]] = {}  # version -> ranks already sent an activation
        self._welcome: Round | None = None
        self._generations = [0] * world_size  # by rank; odd if the rank is left out
        self._view = 0  # a digest of the generations; identifies the present ranks
        self._heard: dict[int, float] = {}
        self._gone: dict[int, str] = {}  # ranks that cannot rejoin, with the reasons

    def _restart(self, result: Round, version: int) -> None:
        """Continue with ``version`` after a round whose result all ranks have."""
        self._last = self._common = result  # common: the last result that all ranks waited for
        self._arrived = self._published = result.version
        self._concluded = result.version  # the last ``finish``, or a result that replaces it
        self.version = version

    @property
    def present(self) -> list[int]:
        """The ranks that are present, in ascending order."""
        return [rank for rank in range(len(self._generations)) if self._is_present(rank)]

    def _is_present(self, rank: int) -> bool:
        return self._generations[rank] % 2 == 0

    # ---- the rank's calls

    def arrive(self, version: int, vector: Tensor, reply: Reply) -> None:
        """Publish this rank's model; reply with the result of this or a later round, or a welcome."""
        self._waiting = version, reply
        if self._welcome is not None:
            self._answer(self._welcome)
            return
        for asked in {version, *(asked for asked, _, _ in self._mail)}:
            self._check_passed(asked, arriving=version)
        self._published = version
        self.rounds.publish(vector)
        if version <= self._last.version:
            self._answer(self._last)
            return
        self._arrived = version
        self.version = min(self.version, version)  # a round of ``finish`` precedes the step's round
        alone = self._waits_for_all(version) or self._called >= version
        if not alone and self.rounds.activates(version, self.host.rank):
            self._called = version
            self._tell(version, self.host.rank)
        self._advance()

    def _answer(self, result: Round) -> None:
        """Send a result to the waiting rank."""
        assert self._waiting is not None, "the rank has arrived"
        (_, reply), self._waiting = self._waiting, None
        resumes, self._welcome = self._welcome is not None, None
        result = self.rounds.collected(result)
        self.answer(reply, Answer(result, resumes, tuple(self.left_out), self.present))

    # ---- messages

    def receive(self, source: int, payload: Tensor) -> None:
        """Handle a message from another agent."""
        header, body = Header.cut(payload)
        self.ledger.received("average", payload.numel())
        self._heard[source] = self.host.now
        if not self._is_present(source):
            self._readmit(source)
            return
        if header.kind in (Kind.DATA, Kind.PING):
            self._check_passed(header.version)
        match header.kind:
            case Kind.ACTIVATE:
                # forward it even if this rank has already ended the round
                self._tell(header.version, header.number)
                self._take_part(header.version)
            case Kind.DATA if header.version <= self._last.version:
                self._repeat(source, header.version)  # the sender's round has ended here
            case Kind.DATA:
                self.mail_of(header.version, header.view, source).append(body)
                self._take_part(header.version)
            case Kind.RESULT if header.version == self.version and self._attempt is not None:
                contributed = self._attempt.contributed
                self._end(Round(header.version, self._values(body), header.number, contributed))
                self._advance()
            case Kind.PING:
                self._post(source, Kind.PONG)
                # the sender waits in a round that has ended here
                if header.version <= self._last.version:
                    self._repeat(source, header.version)
            case Kind.VIEW:
                self._merge(values_in(body, self.host.world_size, torch.int64).tolist())
            case Kind.WELCOME:
                self._on_welcome(header, body)
            case Kind.APART:
                raise self._apart(header.version, header.number)

    def _check_passed(self, version: int, arriving: int = -1) -> None:
        """Raise on all ranks if one waits in a ``finish`` that this rank passed without concluding it."""
        under_way = self.version if self._attempt is not None else -1
        newest = max(arriving, self._arrived, self._last.version, under_way)
        # only if all ranks have always been present (view 0), because a rank that was left out may be in
        # a call that the others have never made
        if is_finish(version) and self._concluded < version < newest and self._view == 0:
            done = step_of(newest + 1)
            for peer in self.present:
                if peer != self.host.rank:
                    self.post(peer, Header(Kind.APART, done, version).pack())
            raise self._apart(version, done)

    def _apart(self, version: int, done: int) -> PeerError:
        where = f"rank {self.host.rank}, local step {step_of(self.version)}, phase 'average'"
        return PeerError(
            f"{where}: some ranks are in finish() after {step_of(version)} local steps, but others have "
            f"done {done}; the ranks are not in the same call: give all ranks the same number of steps"
        )

    def _values(self, body: Tensor) -> Tensor:
        return values_in(body, self._common.total.numel(), self._common.total.dtype)

    def mail_of(self, version: int, view: int, source: int) -> deque[Tensor]:
        """Return the queue of messages from one rank for one round."""
        return self._mail.setdefault((version, view, source), deque())

    def _take_part(self, version: int) -> None:
        self._called = max(self._called, version)
        self._advance()

    def _repeat(self, source: int, version: int) -> None:
        """Send the result of a round that has ended on this rank, or a later result."""
        result = self._common if self._common.version == version else self._last
        self.post(source, Header(Kind.RESULT, result.models, version).pack(), result.total)

    def _tell(self, version: int, root: int) -> None:
        """Forward an activation down the tree of ``root``, to each rank only once."""
        told = self._told.setdefault(version, set())
        pending = tree_children(self.host.rank, root, self.host.world_size)
        while pending:
            child = pending.pop(0)
            if child in told or child == self.host.rank:
                continue
            told.add(child)
            if self._is_present(child):
                self.post(child, Header(Kind.ACTIVATE, root, version).pack())
            else:  # a rank that is left out forwards nothing, so send to its children directly
                pending += tree_children(child, root, self.host.world_size)

    def _post(self, dest: int, kind: Kind, body: Tensor | None = None) -> None:
        self.post(dest, Header(kind, 0, self.version).pack(), body)

    # ---- rounds

    def _waits_for_all(self, version: int) -> bool:
        return is_finish(version) or self.rounds.synchronous(version)

    def _advance(self) -> None:
        """Execute rounds as far as possible without waiting."""
        while self._attempt is not None or self._may_begin():
            attempt = self._attempt = self._attempt or self._begin()
            while not attempt.task.ended and attempt.waits_for.poll():
                attempt.task.resume()
                attempt.since = self.host.now
            if not attempt.task.ended:
                break
            total = attempt.task.result
            self._end(Round(self.version, total, attempt.models, attempt.contributed))
        self._watch()

    def _may_begin(self) -> bool:
        if not self._is_present(self.host.rank):
            return False
        whole = self._waits_for_all(self.version)
        return (self._arrived if whole else self._called) >= self.version

    def _begin(self) -> _Attempt:
        version, members = self.version, self.present
        if not is_finish(version):
            members = list(self.rounds.members(version, members, self.host.rank))
        comm = Subgroup(_AgentComm(self, version, self._view), members)
        task = Task(self.rounds.reduce(comm, version, self._published))
        task.resume()
        return _Attempt(len(members), self._published, task, self.host.now)

    def _end(self, result: Round) -> None:
        """Process a round's result, computed here or received; advance to the next step's round."""
        self._drop()
        # round the age up to steps: a model contributed to a ``finish`` is from the step before
        age = -(-(result.version - result.contributed) // _VERSIONS)
        self.participation.note(age, result.models)
        self.rounds.end(result)
        # the average of a round that waits only for a group's ranks is not a model that all ranks have
        if self._waits_for_all(result.version) and result.models == len(self.present):
            self._common = result
        self._last = result
        if is_finish(result.version):
            self._concluded = result.version
        self.version = round_of(step_of(result.version + 1))
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] > result.version}
        self._told = {v: told for v, told in self._told.items() if v > result.version - _REMEMBERED}
        if self._waiting is not None and result.version >= self._waiting[0]:
            self._answer(result)

    def _drop(self) -> None:
        """Abandon the current attempt; the round may be restarted."""
        if self._attempt is not None:
            self._attempt.task.program.close()
            self._attempt = None

    # ---- who is present

    def tick(self) -> None:
        """Ping the rank that this one waits for; leave it out if it stays silent."""
        if self._attempt is not None and self.due is not None and self.deadline is not None:
            # if this tick is very late, this rank itself was suspended, and messages may be unread
            if self.host.now - self.due > self.deadline / 4:
                self._attempt.since = self.host.now
            self._watch(ask=True)

    def _watch(self, *, ask: bool = False) -> None:
        """Schedule the next check of the rank that this one waits for, if any."""
        self.due = None
        if self._attempt is None:
            return
        peer, since = self._attempt.waits_for.source, self._attempt.since
        if peer in self._gone:
            self._leave_out(peer, self._gone[peer])
        elif self.deadline is not None:
            since = max(since, self._heard.get(peer, since))
            half, end, now = since + self.deadline / 2, since + self.deadline, self.host.now
            if ask and now >= end:
                self._leave_out(peer, f"it was silent for {self.deadline:g} s")
                return
            if ask and now >= half:
                self._post(peer, Kind.PING)
            self.due = half if now < half else end

    def lose(self, peer: int, reason: str) -> None:
        """Leave out a rank that has died; without a deadline, raise an error once the rank is needed."""
        self._gone[peer] = reason
        if self.deadline is None:
            self._watch()
        elif self._is_present(peer):
            self._leave_out(peer, reason)

    def _leave_out(self, peer: int, reason: str) -> None:
        if self.deadline is None:
            raise self.failure(peer, step_of(self.version), reason)
        self._merge(self._toggled(peer), reason)

    def _toggled(self, peer: int) -> list[int]:
        """Return the generations with one rank's generation increased: it is left out or readmitted."""
        return [g + (rank == peer) for rank, g in enumerate(self._generations)]

    def _readmit(self, peer: int) -> None:
        """Welcome back a rank that was left out and has sent a message; send it the last common model."""
        if peer in self._gone:
            return
        self._merge(self._toggled(peer))
        header = Header(Kind.WELCOME, self._common.models, self.version)
        parts = torch.tensor(self._generations, device="cpu"), self._common.total
        self.post(peer, header.pack(), torch.cat([*map(bytes_of, parts)]))

    def _merge(self, generations: list[int], reason: str = "other ranks say so") -> None:
        """Merge received generations; if the present ranks change, restart the current round."""
        # element-wise maxima commute, so the order in which messages arrive does not matter
        newer = [max(pair) for pair in zip(self._generations, generations, strict=True)]
        if newer == self._generations:
            return
        before = set(self.present) - {self.host.rank}
        self._generations = newer
        digest = hashlib.blake2b(repr(newer).encode(), digest_size=8)
        self._view = int.from_bytes(digest.digest(), "little")
        step, present = step_of(self.version), self.present
        self.left_out += [(peer, step, reason) for peer in sorted(before - set(present))]
        for peer in present:
            if peer != self.host.rank:
                self._post(peer, Kind.VIEW, torch.tensor(newer, device="cpu"))
        self._drop()
        if self.host.rank not in present:
            for peer in present:  # any message makes its receiver readmit this rank
                self._post(peer, Kind.PING)
        self._advance()

    def _on_welcome(self, header: Header, body: Tensor) -> None:
        """Resume at the other ranks' current round."""
        cut = 8 * self.host.world_size
        generations = values_in(body[:cut], self.host.world_size, torch.int64).tolist()
        if header.version <= self.version and self._is_present(self.host.rank):
            self._merge(generations)
            return
        self._drop()
        before = header.version - 1
        result = Round(before, self._values(body[cut:]), header.number, before)
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] > before}
        self._restart(result, header.version)
        self.rounds.restart(result.total / result.models)
        self._welcome = result
        if self._waiting is not None:
            self._answer(result)
        self._merge(generations)
        self._advance()
