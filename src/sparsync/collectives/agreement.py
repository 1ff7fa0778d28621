"""Agreement: ranks compare what they are about to do before any data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from sparsync.errors import PeerError
from sparsync.transports.base import Communicator

__all__ = ["agree"]

_DIGEST_BYTES = 8


async def agree(comm: Communicator, facts: Mapping[str, object]) -> None:
    """Return when all ranks hold the same facts.

    Args:
        comm: the group.
        facts: names and values; every rank gives as many, in the same order.

    Raises:
        PeerError: names the first fact that differs, this rank's value and the ranks that differ.

    Cost: one allgather of 8 bytes per fact.
    """
    digests = torch.tensor([_digest(f"{name}={value}") for name, value in facts.items()])
    everyone = await comm.allgather(digests, "agreement")
    for i, (name, value) in enumerate(facts.items()):
        others = [r for r, theirs in enumerate(everyone) if theirs[i] != digests[i]]
        if others:
            raise PeerError(
                f"ranks disagree on {name}: rank {comm.rank} has {value}, but not "
                f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}; "
                "give all ranks the same"
            )


def _digest(text: str) -> int:
    raw = hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
    return int.from_bytes(raw, "little", signed=True)
