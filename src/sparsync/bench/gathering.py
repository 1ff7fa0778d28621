"""What every rank of a benchmark reports, on all ranks; nothing that arrives is run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["gather"]

T = TypeVar("T")


def gather(mine: T, classes: Sequence[type[Any]] = ()) -> list[T]:
    """Return every rank's value, in rank order; every rank of the default group calls it.

    ``torch.distributed.all_gather_object`` would unpickle whatever arrives.  Here torch's
    weights-only reader takes plain values, tensors and the listed classes, and refuses the rest.

    Args:
        mine: numbers, strings, tensors, containers of them, objects of ``classes``.
        classes: whose objects may arrive.
    """
    written = io.BytesIO()
    torch.save(mine, written)
    raw = written.getvalue()
    longest = torch.tensor([len(raw)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    padded = torch.zeros(int(longest), dtype=torch.uint8)
    padded[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(raw)]))
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded)
    with torch.serialization.safe_globals(list(classes)):
        return [
            torch.load(io.BytesIO(bytes(one[: int(length)].numpy())), weights_only=True)
            for one, length in zip(everyone, lengths, strict=True)
        ]
