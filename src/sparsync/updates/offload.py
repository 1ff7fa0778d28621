"""Decide which vectors of an exchange of updates live on the accelerator, and which in host memory.

Besides the model, a rank keeps the shared weights and the residual, with one float per parameter each,
and an outer momentum if there is one.  An exchange reads and writes each vector in runs.  In host memory,
the residual costs four copies over the bus per exchange, and the shared weights five.  The device then
needs no memory that grows with the model, except for messages of a few bits per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from sparsync.console import say
from sparsync.errors import require
from sparsync.updates.fragments import Layout
from sparsync.updates.outer_step import OuterStep
from sparsync.updates.weights import ModelWeights

__all__ = ["Offload", "free_bytes", "offloaded"]

_WORD: Final = 4  # bytes of an element of the shared weights
_STATE: Final = 8  # bytes per parameter of Adam's moments; few optimizers need more


class Offload(NamedTuple):
    """The vectors that are kept in host memory."""

    residual: bool
    shared: bool  # also decides for the outer momentum and the vectors of a late exchange


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes of a device's memory are free for tensors; None if unknown."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info(device)
    # the memory that torch's allocator has reserved, but not given out, is also free
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def offloaded(
    asked: bool | None,
    settings: OuterStep,
    layout: Layout,
    weights: ModelWeights,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Offload:
    """Choose the vectors to keep in host memory; see ``Compression(offload=)``.

    Raises:
        ConfigurationError: the user asked for host memory, but the algorithm reads the whole residual to
            select entries.
    """
    device = weights.device
    by_runs = not settings.dct and all(
        unit.dense or settings.chosen.for_unit(unit)[1].by_runs for unit in layout.units
    )
    require(
        by_runs or not asked,
        f"offload=True is not for {settings.chosen.name}, which reads the whole residual at once; omit "
        "it, or choose algorithm='quantised'",
    )
    if device.type == "cpu" or not by_runs or asked is False:
        return Offload(residual=False, shared=False)
    if asked:
        return Offload(residual=True, shared=True)
    free, size = free_bytes(device), layout.end
    # training will need memory for gradients, and for optimizer states unless they exist already
    expected = size * weights.itemsize
    expected += size * _STATE * (not any(one.state for one in optimizers))
    lacks = free is not None and free < size * _WORD + expected
    if lacks and free is not None:
        say(
            f"{device} has {free / 1e9:.3g} GB left, and the shared weights of {size:,} parameters would "
            f"take {size * _WORD / 1e9:.3g}: they are kept in host memory (Compression(offload=) "
            "overrides this)"
        )
    return Offload(residual=True, shared=lacks)
