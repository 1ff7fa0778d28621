"""The ports of a simulated network: one message after the other, and what they carried."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Port", "Usage"]


@dataclass
class Usage:
    """What one phase did to one port."""

    messages: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0  # that the port was occupied


@dataclass
class Port:
    """One direction of a rank's link, or of a node's.

    Attributes:
        free: virtual time from which it is.
        phases: what it carried, by phase.
    """

    free: float = 0.0
    phases: dict[str, Usage] = field(default_factory=dict)

    def occupy(self, since: float, seconds: float, phase: str, nbytes: float) -> None:
        """Be busy for some time with one message."""
        self.free = since + seconds
        usage = self.phases.get(phase)
        if usage is None:
            usage = self.phases[phase] = Usage()
        usage.messages += 1
        usage.nbytes += nbytes
        usage.seconds += seconds

    @property
    def nbytes(self) -> float:
        """Bytes of all phases."""
        return sum(usage.nbytes for usage in self.phases.values())

    @property
    def seconds(self) -> float:
        """Seconds of all phases."""
        return sum(usage.seconds for usage in self.phases.values())
