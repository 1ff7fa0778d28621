"""Which parameters anybody used in a step, decided alike by all ranks that hold a part of them.

A gradient must not be None on one rank and zeros on another: weight decay and momentum pass over None, so
replicas would drift apart, and norms over shards would wait for shards that have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sparsync.integrations.placement import Placed
from sparsync.integrations.verdict import Verdict
from sparsync.reducer import Reducer
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.base import Communicator, run
from sparsync.units import Slot

__all__ = ["Places", "Usage", "places_of"]

_KEY_BYTES: Final = 8
_CHANNEL: Final = 3  # behind the units', the shares', xi's and that of compared weights


class Places(NamedTuple):
    """Where the marks of parameters are.

    Attributes:
        of: this part's parameters, by name, in the same order on all its replicas.
        total: number of the parameters of all parts.
    """

    of: dict[str, int]
    total: int


@final
class Usage:
    """Puts together what replicas and the parts of a replica say, a bit per parameter.

    Args:
        places: of the marks.
        parts: the ranks that hold the parts of this replica.
        verdict: of these; carries the marks.
        reducer: over the replicas.

    Attributes:
        found: names of the parameters that have a gradient, once a step is committed.

    Cost per step: an allgather of a bit per parameter over the replicas, under way with the exchanges;
    over the parts it goes with the verdict, and once more if nobody used some parameter.
    """

    def __init__(
        self, places: Places, parts: Communicator, verdict: Verdict, reducer: Reducer
    ) -> None:
        self._place, self._count = places
        self._parts, self._verdict, self._reducer = parts, verdict, reducer
        self._names = list(places.of)
        self.found: set[str] = set()
        verdict.carries = self._packed(())
        reducer.verdict = self._decide  # when nothing has been changed: it may fail, too

    async def share(self, used: Collection[str]) -> None:
        """Hear from the other replicas of this part which parameters they used; tell other parts."""
        channel = self._reducer.comm.channel(len(self._reducer.units) + _CHANNEL)
        mine = _packed((i for i, name in enumerate(self._names) if name in used), len(self._names))
        marks = _merged(bytes(m.tolist()) for m in await channel.allgather(_tensor(mine), "used"))
        anywhere = (name for i, name in enumerate(self._names) if marks >> i & 1)
        self._verdict.carries = self._packed(anywhere)

    def _decide(self, broken: str | None) -> str | None:
        broken = self._verdict(broken)
        marks = _merged(self._verdict.heard)
        complete = (1 << self._count) - 1
        if broken:  # every gradient becomes NaN, or none is left
            marks = complete
        elif marks != complete:  # every part sees that
            unused = {name for name in self._names if not marks >> self._place[name] & 1}
            mine = self._packed(self._delivered(unused))
            everyone = run(self._parts.allgather(_tensor(mine), "verdict"))
            marks |= _merged(bytes(theirs.tolist()) for theirs in everyone)
        self.found = {name for name in self._names if marks >> self._place[name] & 1}
        return broken

    def _delivered(self, names: Collection[str]) -> list[str]:
        """Return the parameters of which a residual arrives in this step."""
        return [
            slot.name
            for index, unit in enumerate(self._reducer.units)
            for slot in unit.slots
            if slot.name in names and _any(self._reducer.reduced[index].total, slot)
        ]

    def _packed(self, names: Iterable[str]) -> bytes:
        return _packed((self._place[name] for name in names), self._count)


def places_of(placed: Sequence[Placed], parts: Communicator) -> Places:
    """Agree with the other parts where the marks of all parameters are.

    Args:
        placed: the parameters of this part.
        parts: the ranks that hold the parts of this replica.
    """
    keys = _keys(placed)
    place = {key: i for i, key in enumerate(sorted(_gathered(parts, keys)))}
    return Places({p.name: place[key] for p, key in zip(placed, keys, strict=True)}, len(place))


def _keys(placed: Sequence[Placed]) -> list[bytes]:
    """Name every parameter and the ranks that hold it: layers of two stages may be called the same.

    A plain one beside DTensors is whole on each of their ranks.
    """
    meshes = [
        sorted(p.parameter.device_mesh.mesh.flatten().tolist())
        for p in placed
        if isinstance(p.parameter, DTensor)
    ]
    beside = sorted({rank for mesh in meshes for rank in mesh}) or [dist.get_rank()]
    of_tensors = iter(meshes)
    holders = [next(of_tensors) if isinstance(p.parameter, DTensor) else beside for p in placed]
    texts = [f"{p.name} {ranks}" for p, ranks in zip(placed, holders, strict=True)]
    return [hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest() for text in texts]


def _gathered(parts: Communicator, keys: Sequence[bytes]) -> set[bytes]:
    """Return the keys of all parts."""
    counts = [int(n) for n in run(parts.allgather(torch.tensor([len(keys)]), "groups"))]
    mine = _tensor(b"".join(keys).ljust(max(counts) * _KEY_BYTES, b"\0"))
    everyone = [bytes(theirs.tolist()) for theirs in run(parts.allgather(mine, "groups"))]
    return {
        theirs[at * _KEY_BYTES : (at + 1) * _KEY_BYTES]
        for theirs, count in zip(everyone, counts, strict=True)
        for at in range(count)
    }


def _packed(places: Iterable[int], count: int) -> bytes:
    return sum(1 << place for place in places).to_bytes(-(-count // 8), "little")


def _merged(messages: Iterable[bytes]) -> int:
    marks = 0
    for message in messages:
        marks |= int.from_bytes(message, "little")
    return marks


def _any(total: Vector, slot: Slot) -> bool:
    end = slot.start + slot.size
    if isinstance(total, DenseVector):
        return bool(total.values[slot.start : end].any())
    return bool(total.slice(slot.start, end).values.any())


def _tensor(message: bytes) -> Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)
