"""Compare replicas every so often, to be sure that they are still replicas.

Ranks that apply the same totals to the same parameters stay equal, bit for bit.  A rank whose memory
flipped a bit, whose optimizer had another setting, or whose code changed a weight by itself does not,
and nothing else would tell: the loss only looks a little worse.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsync.errors import CommunicationError, PeerError
from sparsync.integrations.options import Sentinel
from sparsync.transports.agree import Divergence, divergences, heal_
from sparsync.transports.communicator import Communicator

__all__ = ["check_replicas"]

_NAMED = 3  # tensors in a message


async def check_replicas(
    sentinel: Sentinel,
    comm: Communicator,
    tensors: Mapping[str, Tensor],
    step: int,
    parts: Communicator | None = None,
    rank: int | None = None,
) -> None:
    """Compare with all ranks, which call it together, and act on the policy.

    Args:
        sentinel: how.
        comm: the replicas; for FSDP those of this shard.
        tensors: by name, plain tensors (of a DTensor its local one).
        step: for the message.
        parts: ranks that compare with other peers than this one; what one of them finds, all do
            and say.  They call it together as well.
        rank: what messages call this rank; None: its number in ``comm``.

    Raises:
        PeerError: something differs and the policy is "raise", or "heal" without a majority.
        CommunicationError: a peer is gone, or took longer than the timeout.
    """
    said, failure = "", None
    try:
        said = await _compare(sentinel, comm, tensors, step, comm.rank if rank is None else rank)
    except CommunicationError as error:
        failure = error
    try:
        found = [] if parts is None else await _told(parts, failure, said)
    except CommunicationError as error:  # they may be gone, too: the first error counts
        raise (failure or error) from None
    if failure is not None:
        raise failure
    for text, fatal in found:
        if fatal:
            raise PeerError(text)
    for text in dict.fromkeys([said, *(text for text, _ in found)]):
        if text:
            warnings.warn(f"sparsync's sentinel, {text}", RuntimeWarning, stacklevel=2)


async def _compare(
    sentinel: Sentinel, comm: Communicator, tensors: Mapping[str, Tensor], step: int, rank: int
) -> str:
    """Return what is to be said of these replicas, nothing if they are equal."""
    torn = await divergences(comm, tensors)
    if not torn:
        return ""
    called = [int(theirs) for theirs in await comm.allgather(torch.tensor([rank]), "sentinel")]
    found = _named(torn, called, step)
    if sentinel.policy == "raise":
        raise PeerError(
            f"{found}: replicas are no longer equal; restart from the last checkpoint, or "
            "pass Sentinel(policy='heal')"
        )
    if sentinel.policy == "warn":
        return found
    hopeless = [each for each in torn if not each.majority]
    if hopeless:
        raise PeerError(
            f"{_named(hopeless, called, step)}: nobody can tell which is right; restart from the "
            "last checkpoint"
        )
    await heal_(comm, tensors, torn)
    return f"{found}: healed from the majority"


def _named(torn: Sequence[Divergence], called: Sequence[int], step: int) -> str:
    """Name the first tensors that differ, and where; ``called`` has the names of the ranks."""
    more = len(torn) - _NAMED
    shown = "; ".join(
        str(replace(each, groups=tuple(tuple(called[r] for r in group) for group in each.groups)))
        for each in torn[:_NAMED]
    )
    return f"step {step}: {shown}" + (f"; and {more} tensors more" if more > 0 else "")


async def _told(
    parts: Communicator, failure: CommunicationError | None, said: str
) -> list[tuple[str, bool]]:
    """Return what the parts have found, and whether it ends the training; nothing if none has.

    Cost: an allgather of 16 bytes, and of the longest text where something was found.
    """
    text = (said if failure is None else str(failure)).encode()
    mine = torch.tensor([len(text), failure is not None])
    heads = [head.tolist() for head in await parts.allgather(mine, "sentinel")]
    longest = max(length for length, _ in heads)
    if longest == 0:
        return []
    padded = torch.tensor([*text, *bytes(longest - len(text))], dtype=torch.uint8)
    texts = [theirs.tolist() for theirs in await parts.allgather(padded, "sentinel")]
    return [
        (bytes(theirs[:length]).decode(), bool(fatal))
        for (length, fatal), theirs in zip(heads, texts, strict=True)
    ]
