"""Agreement: ranks compare what they are about to do before any data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from sparsync.errors import PeerError
from sparsync.transports.base import Communicator

__all__ = ["agree"]

_DIGEST_BYTES = 8
_TEXT_BYTES = 240  # of a value that others are told
_NAMED = 3  # ranks whose value is in a message


async def agree(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Return when all ranks hold the same facts.

    Args:
        comm: the group.
        facts: names and values; every rank gives as many, in the same order.

    Raises:
        PeerError: names the first fact that differs, this rank's value and those of others.

    Cost: one allgather of 8 bytes per fact; where they differ one more.
    """
    digests = torch.tensor([_digest(f"{name}={value}") for name, value in facts.items()])
    everyone = await comm.allgather(digests, "agreement")
    for i, (name, value) in enumerate(facts.items()):
        others = [r for r, theirs in enumerate(everyone) if theirs[i] != digests[i]]
        if others:  # every rank finds some, and at the same fact
            texts = [bytes(t.tolist()) for t in await comm.allgather(_text(value), "agreement")]
            said = [f"rank {r} has {_read(texts[r])}" for r in others[:_NAMED]]
            more = [f"{len(others) - _NAMED} more differ"] if len(others) > _NAMED else []
            raise PeerError(
                f"ranks disagree on {name}: rank {comm.rank} has {value}, "
                f"{', '.join(said + more)}; give all ranks the same"
            )


def _text(value: object) -> torch.Tensor:
    raw = str(value).encode()
    raw = raw if len(raw) <= _TEXT_BYTES else raw[: _TEXT_BYTES - 3] + b"..."
    return torch.tensor(list(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _read(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="ignore")


def _digest(text: str) -> int:
    raw = hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
    return int.from_bytes(raw, "little", signed=True)
