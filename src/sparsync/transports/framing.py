"""What a transport and its ledger must know about payloads: how long they are, and of what parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, final

from torch import Tensor

from sparsync.errors import WireFormatError
from sparsync.transports.ledger import Parts

__all__ = ["Framing", "Raw", "Several"]


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
    """Bytes whose exact number both sides know; ``kind`` is where the ledger books them."""

    variable = False

    def __init__(self, kind: Literal["value", "control"]) -> None:
        self.kind = kind

    def length(self, buffer: Tensor) -> int:
        """Return the length of the whole buffer."""
        return buffer.numel()

    def parts(self, payload: Tensor) -> Parts:
        """Book all bytes under ``kind``."""
        nbytes = payload.numel()
        return Parts(value=nbytes) if self.kind == "value" else Parts(control=nbytes)


@final
class Several(Framing):
    """Messages one behind the other, each at most as long as its capacity (fixed ones: exactly)."""

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
        total = Parts()
        for block in self.cut(payload):
            total = total + self.framing.parts(block)
        return total
