"""Describe simulated networks: how long a message takes, and which ports it uses.

A *port* carries one message at a time.  Every rank has a port for sending and one for receiving; the
ranks of a node share the two ports of its network card.  With ``ports="unlimited"``, no message waits
for a port.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

from sparsync.errors import ConfigurationError

__all__ = ["Links", "PortName", "Ports", "Route", "Topology", "TwoLevel"]

Ports = Literal["single", "unlimited"]
PortName = int | str  # a rank, or "node 3"


class Route(NamedTuple):
    """The route of messages from one rank to another."""

    alpha: float  # latency in seconds per message
    beta: float  # seconds per byte, on both ports
    out: PortName  # the port that sends
    into: PortName  # the port that receives


class Topology(ABC):
    """A network: the routes between ranks, and the cost of reducing."""

    gamma: float = 0.0  # seconds per byte reduced
    ports: Ports = "single"

    @abstractmethod
    def route(self, source: int, dest: int) -> Route:
        """Return the route from one rank to another."""


@final
@dataclass(frozen=True)
class Links(Topology):
    """A network in which every rank has its own link, and all links are alike."""

    # latency in s per message; by default, one hop of switched Ethernet, including the kernel's network
    # stack
    alpha: float = 50e-6
    beta: float = 8e-9  # s per byte, on each port: 1 Gbit/s
    gamma: float = 0.0  # s per byte reduced
    ports: Ports = "single"  # one message at a time in each direction

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(
                    f"Links: {name} is {getattr(self, name)}; give seconds >= 0"
                )
        if self.ports not in ("single", "unlimited"):
            raise ConfigurationError(
                f"Links: ports is {self.ports!r}; choose single (one message at a time) or unlimited"
            )

    def route(self, source: int, dest: int) -> Route:
        """Return the same costs for all pairs, from the source's port to the destination's."""
        return Route(self.alpha, self.beta, source, dest)


@final
@dataclass(frozen=True)
class TwoLevel(Topology):
    """Nodes of several ranks: fast links inside a node, and one shared network card to other nodes.

    Attributes:
        ranks_per_node: number of consecutive ranks on a node.
        inner: links between the ranks of a node; every rank has its own ports.
        outer: links between nodes.  All messages that leave a node share one port, and all messages that
            enter it share a second one.  ``outer``'s gamma and ``ports`` apply to the whole network.

    Example:
        >>> two = TwoLevel(4, inner=Links(2e-6, 1e-11), outer=Links(20e-6, 8e-10))
        >>> two.route(1, 3).out, two.route(1, 4).out, two.route(1, 4).into
        (1, 'node 0', 'node 1')
    """

    ranks_per_node: int
    inner: Links = field(default_factory=lambda: Links(alpha=5e-6, beta=1e-10))  # 80 Gbit/s
    outer: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ConfigurationError(
                f"TwoLevel: ranks_per_node is {self.ranks_per_node}; give at least 1"
            )
        object.__setattr__(self, "gamma", self.outer.gamma)
        object.__setattr__(self, "ports", self.outer.ports)

    def route(self, source: int, dest: int) -> Route:
        """Return the inner link if both ranks are on one node, otherwise the link between their nodes."""
        home, away = source // self.ranks_per_node, dest // self.ranks_per_node
        if home == away:
            return Route(self.inner.alpha, self.inner.beta, source, dest)
        return Route(self.outer.alpha, self.outer.beta, f"node {home}", f"node {away}")
