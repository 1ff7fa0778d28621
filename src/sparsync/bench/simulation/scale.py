"""``--scale``: a small model that takes as long as a large one.

n / C elements and k / C entries stand for n and k.  Bytes of entries and values count C times,
headers and the counts and histograms of the algorithms once; work per element, per entry and per
byte costs C times as much.  So all that is proportional to n or k is kept, and what is not as well.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from torch import Tensor

from sparsync.bench.simulation.settings import SPREAD, Contender, SimulationSettings
from sparsync.transports.framing import Framing, Several
from sparsync.transports.sim import Weight
from sparsync.wire.base import HEADER_BYTES, MessageFraming, first_bytes, parse_header

__all__ = ["default_scale", "weigher"]

_ENTRY_BYTES = (
    16  # of memory, per entry held: index and value, and half as much while they are merged
)
_BLOCK = 64  # elements of the blocks of a scaled dense allreduce: no padding
# entries that a rank holds: k times this, whatever P is; without a name the sum, up to n
_BOUNDED = MappingProxyType({"oktopk": 6, "budgeted": 6, "halving": 6, "gtopk": 6})
_GATHERING = ("allgather", "gaussiank", "redsync", "redsync-quantized")  # P k entries in messages


def default_scale(contender: Contender, settings: SimulationSettings) -> float:
    """Return the smallest C with which the virtual ranks fit ``settings.memory``.

    Example:
        >>> settings = SimulationSettings(ranks=4, model_size=10_000)
        >>> [default_scale(contender, settings) for contender in settings.contenders()]
        [39.0625, 39.0625, 1.0, 1.0]
    """
    ranks, size, k = settings.ranks, settings.model_size, settings.model_size * settings.density
    if not contender.selects and settings.inputs == SPREAD:
        most = settings.memory / (_ENTRY_BYTES * ranks)
        width = max(min(_BLOCK, int(most / (contender.buckets * ranks))), 1)
        return max(size / (contender.buckets * ranks * width), 1.0)
    name = contender.algorithm.name
    if name in _BOUNDED:
        held = _BOUNDED[name] * k
    elif name in _GATHERING:
        held = ranks * k
    else:
        held = min(ranks * k, 2.0 * size)
    if settings.inputs != SPREAD:
        held += size
    return max(ranks * held * _ENTRY_BYTES / settings.memory, 1.0)


def weigher(scale: float) -> Callable[[Tensor, Framing], Weight]:
    """Return what tells how many bytes and entries a message stands for."""

    def weigh(payload: Tensor, framing: Framing) -> Weight:
        blocks = [payload]
        if isinstance(framing, Several):
            blocks, framing = framing.cut(payload), framing.framing
        nbytes = entries = 0.0
        for block in blocks:
            parts = framing.parts(block)
            nbytes += parts.header + parts.control + scale * (parts.index + parts.value)
            if parts.index and isinstance(framing, MessageFraming):
                entries += scale * parse_header(first_bytes(block, HEADER_BYTES)).count
        return Weight(nbytes, entries)

    return weigh
