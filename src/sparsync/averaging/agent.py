"""The agent of a rank: it executes rounds of averaging whatever the rank itself is computing.

Rounds have version numbers and are executed in order, each once.  A round begins on a rank when the
rank arrives at it, or when word comes that another has: word travels down the binomial tree whose
root is the activator, and with the round's own messages.  Nothing here knows threads or sockets.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync.averaging.membership import Membership
from sparsync.averaging.rounds import (
    Answer,
    Header,
    Kind,
    Round,
    Rounds,
    Welcome,
    step_of,
    tree_children,
)
from sparsync.averaging.runner import Runner
from sparsync.errors import PeerError
from sparsync.transports.actors import Actor, Signal
from sparsync.transports.ledger import Ledger, Parts

_LONG_AGO = 64  # versions: word of an older round is not remembered

__all__ = ["Agent"]


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
        left_out: rank, step and reason, in order.
        ledger: of this agent's messages; taken over by the rank when it arrives.
    """

    def __init__(
        self, rounds: Rounds, first: int, model: Tensor, deadline: float | None = None
    ) -> None:
        self.rounds, self.deadline = rounds, deadline
        self._runner = Runner(rounds, first, model, self._post)
        self.left_out: list[tuple[int, int, str]] = []
        self.ledger = Ledger()
        self._arrived = self._called = first - 1
        self._waiting: tuple[int, Signal] | None = None  # version, and what waits for it
        self._told: dict[int, set[int]] = {}  # version -> whom this rank has told
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
        if version <= self._runner.done:
            signal.set(self._answer(self._runner.last))
            return
        self._arrived, self._waiting = version, (version, signal)
        if version < self.version:  # ``finish``: the round before the next one of a step
            self._runner.version = version
        alone = self._runner.whole(version) or self._called >= version
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
            if header.version <= self._runner.done:  # it waits in a round that has ended here
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
        if header.version <= self._runner.done:  # begun anew by the sender, ended here
            self._repeat(source, header.version)
            return
        self._runner.deliver(source, header, body)
        self._called = max(self._called, header.version)
        self._advance()

    def _answer(self, came: Round | Welcome | None) -> Answer:
        books, self.ledger = self.ledger, Ledger()
        came = self.rounds.collected(came) if isinstance(came, Round) else came
        return Answer(came, books, tuple(self.left_out), self.membership.present)

    def _repeat(self, source: int, version: int) -> None:
        result = self._runner.kept if self._runner.kept.version == version else self._runner.last
        if result is not None:
            header = Header(Kind.RESULT, result.models, version, 0)
            self._post(source, header, result.total)

    def _on_result(self, header: Header, body: Tensor) -> None:
        attempt = self._runner.attempt
        if header.version == self.version and attempt is not None:
            total = body.clone().view(self._runner.kept.total.dtype)
            self._end(Round(header.version, total, header.number, attempt.contributed))
            self._advance()

    # ---- rounds -----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of the round to execute next."""
        return self._runner.version

    def _advance(self) -> None:
        """Execute rounds as far as they come."""
        runner, members = self._runner, self.membership
        while runner.attempt is not None or self._may_begin():
            if runner.attempt is None:
                runner.begin(members.present, self.port.rank, members.view)
            result = runner.run(self.port.now)
            if result is None:
                break
            self._end(result)
        self._plan_tick()

    def _may_begin(self) -> bool:
        version = self.version
        if not self.membership.is_present(self.port.rank):
            return False
        if self._runner.whole(version):
            return self._arrived >= version
        return self._called >= version

    def _end(self, result: Round) -> None:
        self._runner.end(result)
        self._told = {v: told for v, told in self._told.items() if v > result.version - _LONG_AGO}
        if self._waiting is not None and result.version >= self._waiting[0]:
            waiting, self._waiting = self._waiting, None
            waiting[1].set(self._answer(result))

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
        attempt, deadline = self._runner.attempt, self.deadline
        self.due = None
        if attempt is None or attempt.waits_for is None or deadline is None:
            return
        if due is not None and now - due > deadline / 4:  # this rank was away itself
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
        attempt, deadline = self._runner.attempt, self.deadline
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
        if self.deadline is None or not self.port.survives:
            where = f"rank {self.port.rank}, step {step_of(self.version)}, phase 'average'"
            raise PeerError(f"{where}: rank {peer}: {reason}")
        self._merge(self.membership.toggled(peer), reason)

    def _readmit(self, peer: int) -> None:
        """Welcome a rank that was left out and has spoken: it gets the last common model."""
        if peer in self.membership.gone:
            return
        self._merge(self.membership.toggled(peer))
        header = Header(Kind.WELCOME, self._runner.kept.models, self.version, 0)
        parts = torch.tensor(self.membership.generations), self._runner.kept.total.contiguous()
        self._post(peer, header, torch.cat([part.view(torch.uint8) for part in parts]))

    def _merge(self, generations: list[int], reason: str = "other ranks say so") -> None:
        """Take over what is news about who is present; a round under way begins anew among them."""
        before = set(self.membership.present) - {self.port.rank}
        if not self.membership.merge(generations):
            return
        step, out = step_of(self.version), sorted(before - set(self.membership.present))
        self.left_out += [(peer, step, reason) for peer in out]
        news = torch.tensor(self.membership.generations)
        for peer in self.membership.present:
            if peer != self.port.rank:
                self._post(peer, Header(Kind.VIEW, 0, self.version, 0), news)
        self._runner.drop()
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
        total = body[cut:].clone().view(self._runner.kept.total.dtype)
        model = self._runner.jump(header.version, total, header.number)
        self._arrived = self._runner.done
        welcome = Welcome(step_of(header.version), model)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting[1].set(self._answer(welcome))
        else:
            self._welcome = welcome
        self._merge(generations)
        self._advance()

    def _post(self, dest: int, header: Header, body: Tensor | None = None) -> None:
        message = header.join(body)
        values = 0 if body is None else body.numel() * body.element_size()
        parts = Parts(header=message.numel() - values, value=values)
        self.ledger.sent("average", message.numel(), parts)
        self.port.send(dest, message)
