"""The collectives by which the ranks of a linear model exchange: lossless sparse ones, and dense ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch

from sparsync.collectives import (
    Allgather,
    Collective,
    Dense,
    Dynamic,
    RecursiveDoubling,
    Reduced,
    Ring,
    SparcmlAuto,
    split_allgather,
)
from sparsync.errors import ConfigurationError
from sparsync.linear.products import even_cuts
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.base import Codec
from sparsync.wire.coo import Coo
from sparsync.wire.packed import Packed
from sparsync.wire.streams import StreamCodec

__all__ = ["EXCHANGES", "DenseSlices", "gradient_exchange", "update_exchange"]

_Maker = Callable[[Codec[SparseVector], float | None], Collective]

# of at most cap * k entries; none of them rounds
_SPARSE: MappingProxyType[str, _Maker] = MappingProxyType(
    {
        "allgather": lambda codec, cap: Allgather(codec, cap),
        "dynamic": lambda codec, cap: Dynamic(StreamCodec(codec), cap=cap),
        "recursive-doubling": lambda codec, cap: RecursiveDoubling(StreamCodec(codec), cap=cap),
        "ring": lambda codec, cap: Ring(StreamCodec(codec), cap=cap),
        "sparcml-auto": lambda codec, cap: SparcmlAuto(StreamCodec(codec), cap=cap),
        "split-allgather": lambda codec, cap: split_allgather(StreamCodec(codec), cap=cap),
    }
)

EXCHANGES = ("dense", *_SPARSE)


def gradient_exchange(name: str, dtype: np.dtype[Any]) -> Callable[[], Collective]:
    """Return a maker of the collective that sums gradients, which may have any number of entries.

    Args:
        name: one of ``EXCHANGES``.
        dtype: of the values.

    Raises:
        ConfigurationError: unknown name (lists the known ones).

    Example:
        >>> type(gradient_exchange("ring", np.dtype(np.float32))()).__name__
        'Ring'
    """
    return _maker(name, dtype, Dense, None)


def update_exchange(name: str, dtype: np.dtype[Any]) -> Callable[[], Collective]:
    """Return a maker of the collective for updates: at most k entries per rank, in its own slice.

    Arguments and errors are those of ``gradient_exchange``.
    """
    return _maker(name, dtype, DenseSlices, 1.0)


def _maker(
    name: str, dtype: np.dtype[Any], dense: Callable[[], Collective], cap: float | None
) -> Callable[[], Collective]:
    if name not in EXCHANGES:
        raise ConfigurationError(f"unknown exchange {name!r}; choose one of {', '.join(EXCHANGES)}")
    # the shortest format that rounds nothing: packed indices, where it has the values' width
    codec: Codec[SparseVector] = Packed("fp32") if dtype == np.float32 else Coo()
    return dense if name == "dense" else lambda: _SPARSE[name](codec, cap)


@final
class DenseSlices(Collective):
    """Collects every rank's whole slice of a vector: the baseline of ``Scd``.

    Slice r are the elements between ``even_cuts`` r and r + 1; rank r has no others.

    Cost: ceil(log2 P) messages; n (P - 1) / P words received.   State: none.
    Differs from the paper: nothing.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.eye(3)[comm.rank])
        ...     return (await DenseSlices().reduce(comm, mine, k=1, step=0)).total.values.tolist()
        >>> simulate(program, world_size=3).results[1]
        [1.0, 1.0, 1.0]

    References: Renggli et al., SparCML, SC 2019, section 8.2 ("dense counterpart" of its allgather).
    """

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Collect the slices and concatenate them."""
        cuts = even_cuts(selected.size, comm.world_size)
        lengths = [stop - start for start, stop in pairwise(cuts)]
        dense = selected.to_dense()
        mine = dense.new_zeros(max(lengths))  # of one length, so that none is announced
        mine[: lengths[comm.rank]] = dense[cuts[comm.rank] : cuts[comm.rank + 1]]
        slices = await comm.allgather(mine, "allgather")
        parts = [part[:length] for part, length in zip(slices, lengths, strict=True)]
        return Reduced(DenseVector(torch.cat(parts)), selected)
