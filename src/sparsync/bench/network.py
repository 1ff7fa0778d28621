"""A network as users write it: ``1gbit,50us``."""

from __future__ import annotations

import re
from types import MappingProxyType

from sparsync.errors import ConfigurationError
from sparsync.transports.sim import Links

__all__ = ["parse_network"]

_BITS_PER_SECOND = MappingProxyType({"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9})
_PER_SECOND = MappingProxyType({"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0})
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-z]+)(?:/s)?")
_BITS_PER_BYTE = 8


def parse_network(text: str) -> Links:
    """Read a bandwidth and a latency, in either order.

    Args:
        text: as "100mbit,1ms"; units bit, kbit, mbit, gbit (per second) and ns, us, ms, s.

    Raises:
        ConfigurationError: says which part is not understood, or which one is missing.

    Example:
        >>> links = parse_network("1gbit,50us")
        >>> links.alpha, links.beta
        (5e-05, 8e-09)
    """
    example = 'write a bandwidth and a latency, as "1gbit,50us"'
    bandwidth: float | None = None
    latency: float | None = None
    for part in text.lower().split(","):
        match = _NUMBER_AND_UNIT.fullmatch(part.strip())
        unit = match.group(2) if match else ""
        if match and unit in _BITS_PER_SECOND and bandwidth is None:
            bandwidth = float(match.group(1)) * _BITS_PER_SECOND[unit]
        elif match and unit in _PER_SECOND and latency is None:
            latency = float(match.group(1)) / _PER_SECOND[unit]
        else:
            raise ConfigurationError(f"network {text!r}: cannot read {part!r}; {example}")
    if bandwidth is None or latency is None:
        missing = "bandwidth" if bandwidth is None else "latency"
        raise ConfigurationError(f"network {text!r} has no {missing}; {example}")
    if bandwidth == 0:
        raise ConfigurationError(f"network {text!r}: a bandwidth of 0 moves nothing; {example}")
    return Links(alpha=latency, beta=_BITS_PER_BYTE / bandwidth)
