"""Count every byte that a rank sends or receives, by phase and by step, and say what it is for.

The ledger counts payload bytes handed to the transport, headers of the wire format included (a
transport's own framing, TCP's for one, is not), and never synchronises with a device or a peer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from torch import Tensor

from sparsync.errors import WireFormatError

__all__ = ["STAGES", "Framing", "Ledger", "Parts", "Raw", "Several", "Traffic", "place"]

STAGES = ("accumulate", "select", "pack", "communicate", "unpack")  # of a step (RedSync, Figure 10)


@dataclass(frozen=True)
class Parts:
    """Bytes of one payload by what they are for."""

    header: int = 0
    index: int = 0
    value: int = 0
    control: int = 0

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.header + other.header,
            self.index + other.index,
            self.value + other.value,
            self.control + other.control,
        )

    def __sub__(self, other: Parts) -> Parts:
        return Parts(
            self.header - other.header,
            self.index - other.index,
            self.value - other.value,
            self.control - other.control,
        )

    @property
    def nbytes(self) -> int:
        """All bytes of the payload."""
        return self.header + self.index + self.value + self.control


class Framing(ABC):
    """Length and parts of payloads.  ``variable``: the receiver knows only an upper bound before."""

    variable: bool

    @abstractmethod
    def length(self, buffer: Tensor) -> int:
        """Return the bytes of the payload at the start of ``buffer`` (which may be longer)."""

    @abstractmethod
    def parts(self, payload: Tensor) -> Parts:
        """Split the length of a whole payload by purpose."""


@final
class Raw(Framing):
    """Bytes without a structure, booked under ``kind``; both sides know how many, unless ``variable``."""

    def __init__(self, kind: Literal["value", "control"], *, variable: bool = False) -> None:
        self.kind, self.variable = kind, variable

    def length(self, buffer: Tensor) -> int:
        """Return the length of the whole buffer."""
        return buffer.numel()

    def parts(self, payload: Tensor) -> Parts:
        """Book all bytes under ``kind``."""
        nbytes = payload.numel()
        return Parts(value=nbytes) if self.kind == "value" else Parts(control=nbytes)


@final
class Several(Framing):
    """Messages one after the other, each at most as long as its capacity (fixed ones: exactly)."""

    def __init__(self, framing: Framing, capacities: Sequence[int]) -> None:
        self.framing, self.capacities, self.variable = framing, capacities, framing.variable

    def cut(self, buffer: Tensor) -> list[Tensor]:
        """Cut the messages apart (views)."""
        blocks, at = [], 0
        for capacity in self.capacities:
            length = self.framing.length(buffer[at:]) if self.variable else capacity
            if length > min(capacity, buffer.numel() - at):
                raise WireFormatError(
                    f"a message claims {length} bytes where at most "
                    f"{min(capacity, buffer.numel() - at)} can be; the sender is corrupt or hostile"
                )
            blocks.append(buffer[at : at + length])
            at += length
        return blocks

    def length(self, buffer: Tensor) -> int:
        """Sum the lengths of the messages."""
        return sum(block.numel() for block in self.cut(buffer))

    def parts(self, payload: Tensor) -> Parts:
        """Sum the parts of the messages."""
        return sum(map(self.framing.parts, self.cut(payload)), Parts())


@dataclass
class Traffic:
    """Bytes and messages of one rank over some span (a phase, a step, a run)."""

    sent: int = 0
    received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    sent_parts: Parts = Parts()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent + other.sent,
            self.received + other.received,
            self.messages_sent + other.messages_sent,
            self.messages_received + other.messages_received,
            self.sent_parts + other.sent_parts,
        )

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent - other.sent,
            self.received - other.received,
            self.messages_sent - other.messages_sent,
            self.messages_received - other.messages_received,
            self.sent_parts - other.sent_parts,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return asdict(self)


def place(step: int, local_step: int | None = None) -> str:
    """Return where training is, as errors say it.

    Args:
        step: of the ledger: an exchange.
        local_step: the last one before it, where an optimizer takes several between two exchanges.

    Example:
        >>> place(65), place(32, 65)
        ('step 65', 'exchange 32, local step 65')
    """
    return f"step {step}" if local_step is None else f"exchange {step}, local step {local_step}"


class Ledger:
    """Counts the traffic of one communicator, and knows at which step that is.

    Attributes:
        step: of the open books; where local steps lie between exchanges, an exchange.
        local_step: the last one before the present exchange; None: each step is an exchange.

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
        self._lock = threading.Lock()  # stages of autograd's and of the engine's thread overlap
        self.last_step = Traffic()
        self.sent_max = 0  # bytes, over finished steps
        self.received_max = 0
        self.outside = Traffic()  # of no step
        self._finished: dict[str, Traffic] = {}  # per phase, over finished steps

    def begin_step(self, step: int) -> None:
        """Close the books of the current step and open those of ``step`` (0-based)."""
        if self.phases:
            self.last_step = self.current_step()
            self.sent_max = max(self.sent_max, self.last_step.sent)
            self.received_max = max(self.received_max, self.last_step.received)
            self._finished, self.phases = self.by_phase(), {}
        self.step = step

    def place(self, step: int | None = None) -> str:
        """Return where training is, or was at ``step``, for errors: see ``place``."""
        return place(self.step if step is None else step, self.local_step)

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Book what is sent meanwhile to no step: only ``total``, its phases and ``outside`` have it."""
        before, opened, self.phases = self.total(), self.phases, {}
        try:
            yield
        finally:
            self._finished, self.phases = self.by_phase(), opened
            self.outside += self.total() - before

    def set_up(self) -> Traffic:
        """Count what was sent so far for no step that follows; return it, without what was outside."""
        self._finished, self.phases = self.by_phase(), {}
        return self.of_steps()

    def of_steps(self) -> Traffic:
        """Sum the whole run but what was outside of steps."""
        return self.total() - self.outside

    def sent(self, phase: str, nbytes: int, parts: Parts, messages: int = 1) -> None:
        """Record what this rank sent."""
        self._add(phase, Traffic(nbytes, 0, messages, 0, parts))

    def received(self, phase: str, nbytes: int, messages: int = 1) -> None:
        """Record what this rank received."""
        self._add(phase, Traffic(0, nbytes, 0, messages))

    def reduced(self, phase: str, tensor: Tensor, world_size: int) -> None:
        """Record a native allreduce: 2 n (P - 1) / P sent and received."""
        nbytes = -(-2 * tensor.numel() * tensor.itemsize * (world_size - 1) // world_size)
        parts = Parts(value=nbytes) if tensor.is_floating_point() else Parts(control=nbytes)
        messages = 2 * (world_size - 1).bit_length()
        self.sent(phase, nbytes, parts, messages)
        self.received(phase, nbytes, messages)

    def take(self, other: Ledger) -> None:
        """Add what another one recorded in its current step."""
        for phase, traffic in other.phases.items():
            self._add(phase, traffic)

    def spent(self, stage: str, seconds: float) -> None:
        """Record time: of the machine, or virtual in the simulator."""
        thread = threading.get_ident()
        with self._lock:
            self.stages[stage] = self.stages.get(stage, 0.0) + seconds
            self._booked[thread] = self._booked.get(thread, 0.0) + seconds

    @property
    def booked(self) -> float:
        """Seconds of all stages of this thread; those of others pass at the same time."""
        return self._booked.get(threading.get_ident(), 0.0)

    def current_step(self) -> Traffic:
        """Sum the current step over its phases."""
        return sum(self.phases.values(), Traffic())

    def by_phase(self) -> dict[str, Traffic]:
        """Sum the whole run per phase, the current step included."""
        whole = dict(self._finished)
        for phase, traffic in self.phases.items():
            whole[phase] = whole.get(phase, Traffic()) + traffic
        return whole

    def total(self) -> Traffic:
        """Sum the whole run, the current step included."""
        return sum(self.by_phase().values(), Traffic())

    def _add(self, phase: str, traffic: Traffic) -> None:
        self.phases[phase] = self.phases.get(phase, Traffic()) + traffic
