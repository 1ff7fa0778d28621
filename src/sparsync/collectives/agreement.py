"""Agreement: ranks compare what they are about to do before any data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest

import torch

from sparsync.errors import PeerError
from sparsync.transports.base import Communicator

__all__ = ["agree"]

_DIGEST_BYTES = 8
_TEXT_BYTES = 1 << 16  # of a value that others are told
_NAMED = 3  # ranks whose value is in a message
_SHOWN, _BEFORE = 240, 60  # characters of a value, and of them those before the first that differs


async def agree(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Return when all ranks hold the same facts.

    Args:
        comm: the group.
        facts: names and values; every rank gives as many, in the same order.

    Raises:
        PeerError: names the first fact that differs, this rank's value and those of others.

    Cost: one allgather of 8 bytes per fact; where they differ one more, of 64 KiB from every rank.
    """
    digests = torch.tensor([_digest(f"{name}={value}") for name, value in facts.items()])
    everyone = await comm.allgather(digests, "agreement")
    for i, (name, value) in enumerate(facts.items()):
        others = [r for r, theirs in enumerate(everyone) if theirs[i] != digests[i]]
        if others:  # every rank finds some, and at the same fact
            texts = [_read(t) for t in await comm.allgather(_bytes(value), "agreement")]
            named = {r: texts[r] for r in (comm.rank, *others[:_NAMED])}
            columns = enumerate(zip_longest(*named.values()))
            first = next((at for at, characters in columns if len(set(characters)) > 1), 0)
            said = [f"rank {r} has {_excerpt(text, first)}" for r, text in named.items()]
            more = [f"{len(others) - _NAMED} more differ"] if len(others) > _NAMED else []
            raise PeerError(
                f"ranks disagree on {name}: {', '.join(said + more)}; give all ranks the same"
            )


def _bytes(value: object) -> torch.Tensor:
    raw = str(value).encode()[:_TEXT_BYTES]
    return torch.frombuffer(bytearray(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _read(text: torch.Tensor) -> str:
    said = bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore")
    # one line, and nothing that a terminal obeys: it came from another machine
    return "".join(c if c.isprintable() else "?" for c in said)


def _excerpt(text: str, first: int) -> str:
    """Return what fits in a message, with the first character that differs."""
    start = max(0, first - _BEFORE) if len(text) > _SHOWN else 0
    end = start + _SHOWN
    return "..." * (start > 0) + text[start:end] + "..." * (end < len(text))


def _digest(text: str) -> int:
    raw = hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
    return int.from_bytes(raw, "little", signed=True)
