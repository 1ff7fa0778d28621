"""A subset of a group's ranks as a group, and the world of a single process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, DeadlockError
from sparsync.transports.actors import Actor, Host, Reply
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Finished, Operation
from sparsync.transports.ledger import Framing

__all__ = ["SoloCommunicator", "SoloHost", "Subgroup"]


@final
class Subgroup(Communicator):
    """Some ranks of a parent communicator, renumbered; it shares the parent's links and ledger."""

    def __init__(self, parent: Communicator, ranks: Sequence[int]) -> None:
        if parent.rank not in ranks or len(set(ranks)) != len(ranks):
            raise ConfigurationError(
                f"Subgroup: ranks {list(ranks)} must be distinct and contain rank {parent.rank}"
            )
        super().__init__(list(ranks).index(parent.rank), len(ranks), parent.device)
        self.parent, self.ranks, self.ledger = parent, list(ranks), parent.ledger
        # Parent and subgroup share a channel and the records of failures.  All their messages have one
        # order, aborting either ends the waits of both, and if an exchange of either fails, neither
        # can start another one.
        self.tag, self.aborted, self.broken = parent.tag, parent.aborted, parent.broken

    def abort(self) -> None:
        """Abort the parent, which owns the links."""
        self.parent.abort()

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Send through the parent."""
        # look up the parent's channel on every call: ``Subgroup.channel`` changes this handle's tag, but
        # not the parent's
        return self.parent.channel(self.tag).start_send(payload, self.ranks[dest], phase, framing)

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Receive through the parent."""
        source = self.ranks[source]
        return self.parent.channel(self.tag).start_recv(source, capacity, phase, framing)

    @property
    def now(self) -> float:
        """Seconds on the parent's clock."""
        return self.parent.now

    def work(self, nbytes: int, *, dense: bool = False) -> Operation:
        """Account for the work in the parent."""
        return self.parent.work(nbytes, dense=dense)


@final
class SoloCommunicator(Communicator):
    """The communicator of a single process without ``torch.distributed``; it has no peers."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1, device=torch.device("cpu"))

    def host(self, actor: Actor) -> Host:
        """Run an actor that receives no messages."""
        return SoloHost(actor)

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Never called: ``isend`` refuses to send to a rank that does not exist."""
        raise AssertionError("a world of one sends nothing")

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Never called: ``irecv`` refuses to receive from a rank that does not exist."""
        raise AssertionError("a world of one receives nothing")


@final
class SoloHost(Host):
    """Hosts the actor of a single process, in synchronous calls; the actor receives no messages."""

    rank, world_size = 0, 1

    def __init__(self, actor: Actor) -> None:
        actor.meet(self)

    def send(self, dest: int, payload: Tensor) -> None:
        """Never called, because the actor has no peers."""
        raise AssertionError("a world of one sends nothing")

    def call(self, function: Callable[[], None]) -> None:
        """Call the function immediately."""
        function()

    def ask(self, function: Callable[[Reply], None], where: Callable[[], str]) -> Operation:
        """Call the function immediately; the actor must reply before the call returns."""
        answers: list[Any] = []
        function(answers.append)
        # an actor may reply later, when a message arrives or time passes; here neither happens, so the
        # wait would never end
        if not answers:
            raise DeadlockError(f"{where()} waits for itself")
        return Finished(answers[0])

    def close(self) -> None:
        """Do nothing, because nothing runs."""
