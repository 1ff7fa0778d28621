"""What the event queue moves: messages, and the operations that wait for them."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.transports.base import Operation
from sparsync.transports.sim.topology import PortName

__all__ = ["Link", "Message", "SimOperation", "Task", "Weight"]

Link = tuple[int, int, int]  # source, dest, tag


class Weight(NamedTuple):
    """What a message counts for.

    Attributes:
        nbytes: that the ports carry; its payload's length, unless that stands for more.
        entries: that are packed before and unpacked after it.
    """

    nbytes: float
    entries: float = 0.0


@final
class SimOperation(Operation):
    """An operation that the event queue completes."""

    def __init__(self, verb: str, peer: int | None = None, phase: str = "") -> None:
        self.verb, self.peer, self.phase = verb, peer, phase
        self.waiter: Task | None = None  # goes on when this is done
        self.entries = 0.0

    @property
    def what(self) -> str:
        """For the message of a deadlock."""
        return (
            self.verb if self.peer is None else f"{self.verb} {self.peer} in phase '{self.phase}'"
        )

    def wait(self) -> None:
        """Blocking is impossible inside the simulator: its coroutines await."""
        raise ConfigurationError(
            "a simulated communicator cannot block: write an async function and pass it to "
            "sparsync.simulate(function, world_size=...)"
        )


@dataclass(slots=True, eq=False)
class Message:
    """What is under way."""

    link: Link
    payload: Tensor
    phase: str
    weight: Weight
    sent: SimOperation
    into: PortName = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Task:
    """A coroutine of a rank, and what it waits for."""

    rank: int
    program: Coroutine[Operation, None, Any]
    ended: SimOperation
    main: bool = False
    waits_for: SimOperation | None = None
    value: Any = None
