"""Count every byte that a rank sends or receives, by phase, by step and by purpose.

The ledger counts the payloads that the transport is given.  They include the wire format's headers but
not the transport's own framing (such as TCP's).  The ledger never synchronises with a device or a peer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import add, sub
from typing import Any, Literal, TypeVar, final

from torch import Tensor

from sparsync.errors import WireFormatError

__all__ = ["STAGES", "Framing", "Ledger", "Parts", "Raw", "Several", "Traffic", "place"]

C = TypeVar("C", bound="_Counts")

# The stages of a step (RedSync, Figure 10).  RedSync's "mask" is split in two here: "accumulate"
# corrects momentum and adds gradients; "mask" removes delivered entries from residual and velocity.
STAGES = ("accumulate", "mask", "select", "pack", "communicate", "unpack")


class _Counts:
    """A dataclass of counts; instances are added field by field."""

    def __add__(self: C, other: C) -> C:
        return type(self)(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self: C, other: C) -> C:
        return type(self)(*map(sub, vars(self).values(), vars(other).values()))


@final
@dataclass(frozen=True)
class Parts(_Counts):
    """The number of bytes of one payload, by purpose."""

    header: int = 0
    index: int = 0
    value: int = 0
    control: int = 0

    @property
    def nbytes(self) -> int:
        """The number of all bytes of the payload."""
        return self.header + self.index + self.value + self.control


class Framing(ABC):
    """Finds the length of a payload, and how many of its bytes serve which purpose.

    Attributes:
        variable: whether the receiver knows only an upper bound of the length in advance.
    """

    variable: bool

    @abstractmethod
    def length(self, buffer: Tensor) -> int:
        """Return the number of bytes of the payload at the start of a (possibly longer) ``buffer``."""

    @abstractmethod
    def parts(self, payload: Tensor) -> Parts:
        """Return the number of bytes of a whole payload, split by purpose."""

    def first(self, buffer: Tensor, capacity: int) -> Tensor:
        """Return the payload of at most ``capacity`` bytes at the start of ``buffer`` (a view).

        Raises:
            WireFormatError: the payload claims to be longer than ``capacity`` or than the buffer.
        """
        length = self.length(buffer) if self.variable else capacity
        most = min(capacity, buffer.numel())
        # check the length, because slicing would silently truncate a message that is too long, and a
        # wrong length would shift all later messages
        if length > most:
            raise WireFormatError(
                f"a message claims {length} bytes where at most {most} can be; the sender is corrupt or "
                "hostile"
            )
        return buffer[:length]


@final
class Raw(Framing):
    """Unstructured bytes, counted under ``kind``; unless ``variable``, both sides know their number."""

    def __init__(self, kind: Literal["value", "control"], *, variable: bool = False) -> None:
        self.kind, self.variable = kind, variable

    def length(self, buffer: Tensor) -> int:
        """Return the length of the whole buffer."""
        return buffer.numel()

    def parts(self, payload: Tensor) -> Parts:
        """Count all bytes under ``kind``."""
        nbytes = payload.numel()
        return Parts(value=nbytes) if self.kind == "value" else Parts(control=nbytes)


@final
class Several(Framing):
    """Consecutive messages; each is as long as its capacity or, with ``variable``, at most that long."""

    def __init__(self, framing: Framing, capacities: Sequence[int]) -> None:
        self.framing, self.capacities, self.variable = framing, capacities, framing.variable

    def cut(self, payload: Tensor) -> list[Tensor]:
        """Split a whole payload into messages (views).

        Raises:
            WireFormatError: a message is longer than it may be, or bytes are left over.
        """
        blocks = self._leading(payload)
        claimed = sum(block.numel() for block in blocks)
        if claimed != payload.numel():
            raise WireFormatError(
                f"{len(blocks)} messages claim {claimed} bytes of {payload.numel()}; the sender is "
                "corrupt or hostile"
            )
        return blocks

    def length(self, buffer: Tensor) -> int:
        """Return the total length of the messages."""
        return sum(block.numel() for block in self._leading(buffer))

    def _leading(self, buffer: Tensor) -> list[Tensor]:
        blocks = []
        for capacity in self.capacities:
            blocks.append(self.framing.first(buffer, capacity))
            buffer = buffer[blocks[-1].numel() :]
        return blocks

    def parts(self, payload: Tensor) -> Parts:
        """Return the sum of the messages' parts."""
        return sum(map(self.framing.parts, self.cut(payload)), Parts())


@final
@dataclass
class Traffic(_Counts):
    """Bytes and messages of one rank over a phase, a step or a run."""

    sent: int = 0
    received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    sent_parts: Parts = Parts()

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a dictionary of plain numbers."""
        return asdict(self)


def place(step: int, local_step: int | None = None) -> str:
    """Return a text for errors with the number of a step, or of an exchange and a local step.

    Args:
        step: the ledger's step, which counts exchanges if an optimizer takes local steps.
        local_step: the last local step before that exchange; None if every step is an exchange.

    Example:
        >>> place(65), place(32, 65)
        ('step 65', 'exchange 32, local step 65')
    """
    return f"step {step}" if local_step is None else f"exchange {step}, local step {local_step}"


class Ledger:
    """Counts the traffic of one communicator, and knows the current step.

    Attributes:
        step: the open step; it counts exchanges if an optimizer takes local steps.
        local_step: the last local step before the current exchange; None if every step is an
            exchange.

    Example:
        >>> ledger = Ledger()
        >>> ledger.sent("split", 24, Parts(header=8, index=8, value=8)); ledger.begin_step(1)
        >>> ledger.total().sent, ledger.last_step.sent, ledger.phases
        (24, 24, {})
    """

    def __init__(self) -> None:
        self.step = 0
        self.local_step: int | None = None
        self.phases: dict[str, Traffic] = {}  # of the current step
        self.stages: dict[str, float] = {}  # seconds of the whole run, by stage
        self._booked: dict[int, float] = {}  # seconds of all stages, by thread
        # Autograd's thread and the engine's record stages concurrently, so these need a lock.  Traffic
        # needs none, because only one thread communicates at a time.
        self._lock = threading.Lock()
        self.last_step = Traffic()
        # the largest numbers of bytes in any finished step: the papers bound a rank's traffic in every
        # step, not on average
        self.sent_max = 0
        self.received_max = 0
        self.outside = Traffic()  # outside of any step
        self._finished: dict[str, Traffic] = {}  # per phase, over finished steps

    def begin_step(self, step: int) -> None:
        """Finish counting the current step, and start to count ``step`` (0-based)."""
        # a step without traffic, e.g. when gradients are accumulated, does not change ``last_step``
        if self.phases:
            self.last_step = self.current_step()
            self.sent_max = max(self.sent_max, self.last_step.sent)
            self.received_max = max(self.received_max, self.last_step.received)
            self._finished, self.phases = self.by_phase(), {}
        self.step = step

    def within(self, local_step: int) -> None:
        """Set the local step, which errors and message headers state along with the exchange."""
        self.local_step = local_step

    def place(self, step: int | None = None) -> str:
        """Return a text for errors with the number of ``step``, by default the current one."""
        return place(self.step if step is None else step, self.local_step)

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Return a context that counts traffic in totals, phases and ``outside``, but in no step."""
        before, opened, self.phases = self.total(), self.phases, {}
        try:
            yield
        finally:
            self._finished, self.phases = self.by_phase(), opened
            self.outside += self.total() - before

    def set_up(self) -> Traffic:
        """Let the open step begin without traffic; return the traffic so far, without ``outside``."""
        self._finished, self.phases = self.by_phase(), {}
        return self.of_steps()

    def of_steps(self) -> Traffic:
        """Return the traffic of the whole run, without traffic outside of steps."""
        return self.total() - self.outside

    def sent(self, phase: str, nbytes: int, parts: Parts, messages: int = 1) -> None:
        """Record messages that this rank sent."""
        t = self.phases.get(phase) or Traffic()
        self.phases[phase] = Traffic(
            t.sent + nbytes,
            t.received,
            t.messages_sent + messages,
            t.messages_received,
            t.sent_parts + parts,
        )

    def received(self, phase: str, nbytes: int, messages: int = 1) -> None:
        """Record messages that this rank received."""
        t = self.phases.get(phase) or Traffic()
        self.phases[phase] = Traffic(
            t.sent,
            t.received + nbytes,
            t.messages_sent,
            t.messages_received + messages,
            t.sent_parts,
        )

    def reduced(self, phase: str, tensor: Tensor, world_size: int) -> None:
        """Record a native allreduce: 2 n (P - 1) / P sent and received."""
        # gloo, NCCL and MPI do not report what they send.  Record the fewest bytes that any allreduce
        # needs, and as many messages as ``Communicator.allreduce`` sends, 2 ceil(log2 P).
        nbytes = -(-2 * tensor.numel() * tensor.itemsize * (world_size - 1) // world_size)
        parts = Parts(value=nbytes) if tensor.is_floating_point() else Parts(control=nbytes)
        messages = 2 * (world_size - 1).bit_length()
        self.sent(phase, nbytes, parts, messages)
        self.received(phase, nbytes, messages)

    def take(self, other: Ledger) -> None:
        """Add the counts of another ledger's current step."""
        for phase, traffic in other.phases.items():
            self.phases[phase] = self.phases.get(phase, Traffic()) + traffic

    def spent(self, stage: str, seconds: float) -> None:
        """Record seconds under a stage: real time or, in the simulator, virtual time."""
        thread = threading.get_ident()
        with self._lock:
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds
            self._booked[thread] = self._booked.get(thread, 0.0) + seconds

    @property
    def booked(self) -> float:
        """Seconds that this thread has recorded under all stages; other threads run in parallel."""
        return self._booked.get(threading.get_ident(), 0.0)

    def current_step(self) -> Traffic:
        """Return the traffic of the current step, summed over its phases."""
        return sum(self.phases.values(), Traffic())

    def by_phase(self) -> dict[str, Traffic]:
        """Return the traffic of the whole run, including the current step, by phase."""
        whole = dict(self._finished)
        for phase, traffic in self.phases.items():
            whole[phase] = whole.get(phase, Traffic()) + traffic
        return whole

    def total(self) -> Traffic:
        """Return the traffic of the whole run, including the current step."""
        return sum(self.by_phase().values(), Traffic())
