"""What a rank's agent executes in each round: who takes part, what is contributed, what comes of it."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from sparsync.transports.base import Communicator, Finished, Operation
from sparsync.transports.framing import Framing
from sparsync.transports.ledger import Ledger

__all__ = [
    "Answer",
    "Delivery",
    "GroupComm",
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


class Kind:
    """What a message between agents is."""

    ACTIVATE: Final = 1  # a round has begun; number: the activator
    DATA: Final = 2  # of a round's collective
    RESULT: Final = 3  # of a round that the receiver has not ended; number: models in the sum
    PING: Final = 4  # are you there?
    PONG: Final = 5
    VIEW: Final = 6  # who is present
    WELCOME: Final = 7  # to one that was left out: where the others are, and their model


class Header(NamedTuple):
    """What every message between agents begins with; 24 bytes, so that values behind it are aligned.

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
        return cls(*_LAYOUT.unpack(bytes(message[: _LAYOUT.size].tolist()))), message[
            _LAYOUT.size :
        ]


def round_of(step: int) -> int:
    """Return the version of the average behind a 0-based step; the even one before it is ``finish``'s.

    Example:
        >>> [round_of(step) for step in range(3)], step_of(5)
        ([1, 3, 5], 2)
    """
    return 2 * step + 1


def step_of(version: int) -> int:
    """Return the step that a round belongs to."""
    return version // 2


class Round(NamedTuple):
    """What came of a round.

    Attributes:
        version: its number.
        total: sum of the models.
        models: how many they are.
        contributed: version of the model that this rank put in; older than ``version``: a stale one.
    """

    version: int
    total: Tensor
    models: int
    contributed: int


class Welcome(NamedTuple):
    """What a rank that was left out is given when it comes back: go on with this step and model."""

    step: int
    model: Tensor


class Answer(NamedTuple):
    """What a rank gets when it arrives.

    Attributes:
        came: the newest round, or a welcome.
        books: of the agent, since the last answer.
        left_out: see ``Agent``.
        present: ranks that take part, ascending.
    """

    came: Round | Welcome | None
    books: Ledger
    left_out: tuple[tuple[int, int, str], ...]
    present: list[int]


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


class Rounds(ABC):
    """What the rounds of an algorithm are; its calls come from the agent, one at a time.

    Attributes:
        published: version of what ``contribution`` returns.
    """

    published: int

    def following(self, version: int) -> int:
        """Return the number of the next round behind ``version`` that belongs to a step."""
        return round_of(step_of(version) + version % 2)

    @abstractmethod
    def synchronous(self, version: int) -> bool:
        """Tell whether a rank takes part only when it has arrived itself."""

    @abstractmethod
    def activates(self, version: int, rank: int) -> bool:
        """Tell whether this rank's arrival starts the round for all."""

    @abstractmethod
    def members(self, version: int, present: Sequence[int], rank: int) -> Sequence[int]:
        """Return this rank's group among those present, ascending."""

    @abstractmethod
    def publish(self, version: int, vector: Tensor) -> None:
        """Take what this rank contributes from now on."""

    def restart(self, version: int, model: Tensor) -> None:
        """Begin behind ``version`` with a model that all ranks have."""
        self.publish(version, model)

    @abstractmethod
    def contribution(self, version: int) -> Tensor:
        """Return what this rank contributes; a round that begins anew asks again."""

    def end(self, result: Round) -> None:  # noqa: B027 (most keep nothing)
        """Take a round's result."""

    def collected(self, newest: Round) -> Round:
        """Return what a rank gets that arrives: by default the newest round."""
        return newest

    @abstractmethod
    def reduce(self, comm: Communicator, vector: Tensor) -> Coroutine[Operation, None, Tensor]:
        """Sum vectors over a group."""


@final
class GroupComm(Communicator):
    """The members of a group as a communicator, over the messages of their agents.

    Args:
        members: ranks of the group, ascending.
        rank: this rank, one of them.
        post: sends a body to a rank.
        mail: what has arrived, by rank.
    """

    def __init__(
        self,
        members: Sequence[int],
        rank: int,
        post: Callable[[int, Tensor], None],
        mail: dict[int, deque[Tensor]],
    ) -> None:
        super().__init__(list(members).index(rank), len(members), torch.device("cpu"))
        self.members, self.post, self.mail = list(members), post, mail

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Hand a message to the agent."""
        self.post(self.members[dest], payload)
        return Finished()

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Expect a message of the agent's mail."""
        return Delivery(self.mail, self.members[source])


@final
class Delivery(Operation):
    """A message that a group's collective waits for."""

    def __init__(self, mail: dict[int, deque[Tensor]], source: int) -> None:
        self.mail, self.source = mail, source

    def poll(self, seconds: float = 0.0) -> bool:
        """Take the message, if it is there."""
        if not self.done and self.mail.get(self.source):
            self.result, self.done = self.mail[self.source].popleft(), True
        return self.done

    def wait(self) -> None:
        """Never called: the agent resumes what awaits this."""
        raise AssertionError("an agent does not block")

    def __await__(self) -> Any:
        while not self.poll():
            yield self
        return self.result
