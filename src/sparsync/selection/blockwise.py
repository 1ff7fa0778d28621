"""Blockwise: select the same number of entries from every block of consecutive elements."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import require
from sparsync.selection.selector import Selector
from sparsync.sparse import SparseVector

__all__ = ["Blockwise", "per_block", "share"]

_MOST = 2**31 - 1  # largest block, in elements


@final
class Blockwise(Selector):
    """Selects the ``entries`` of largest magnitude from every ``block`` consecutive elements.

    A block with fewer nonzero elements contributes fewer; ties go to the lower index.  The last, shorter
    block contributes its share of ``entries``, rounded, but at least one.  So the number of selected
    entries depends on n, not on k.  With ``entries=None``, it is at least ``min(k, n)``.  If the density
    amounts to a whole number of entries per block, it exceeds k by at most one, because the last block's
    share is rounded; otherwise, it may exceed k by one per block.  A collective with a cap of 1 then
    sends only the k largest.

    Args:
        entries: entries per block; by default the smallest number that selects k (``per_block``).  If k
            is 0, no entry is selected.
        block: elements per block (SparCML's bucket; 512 in its sections 8.3 and 8.4).

    Cost: a partial sort of every block, all in one call.   State: none.
    Differs from the paper: any n; deterministic under ties; zeros are not sent.

    Example:
        >>> accumulated = torch.tensor([1.0, -4.0, 0.0, 2.0, 0.5])
        >>> Blockwise(entries=1, block=2).select(accumulated, k=3, step=0).indices.tolist()
        [1, 3, 4]

    References: Renggli et al., SparCML, SC 2019, section 8.3 ("k entries out of each bucket of 512").
    """

    def __init__(self, entries: int | None = None, block: int = 512) -> None:
        good = 1 <= block <= _MOST
        require(good, f"Blockwise: block is {block}; give at least 1 element, at most {_MOST}")
        advice = f"give 1 to {block} per block, or None for the block's share of k"
        fits = entries is None or 1 <= entries <= block
        require(fits, f"Blockwise: entries is {entries}; {advice}")
        self.entries, self.block = entries, block

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> SparseVector:
        """Return the largest entries of every block."""
        size, block = accumulated.numel(), self.block
        if k <= 0 or size == 0:
            return SparseVector.empty(size, accumulated)
        entries = self.entries or per_block(k, size, block)
        whole = size - size % block
        keys = kernels.magnitude_keys(accumulated)
        # all whole blocks are rows of one matrix, which one call sorts; the remaining elements are sorted
        # separately
        masks = [_largest(keys[:whole].view(-1, block), entries).flatten()]
        if whole < size:
            part = max(share(entries, size - whole, block), 1)
            masks.append(_largest(keys[whole:].view(1, -1), part).flatten())
        indices = torch.cat(masks).nonzero().flatten()
        return SparseVector(indices, accumulated[indices], size)


def share(entries: int, size: int, block: int) -> int:
    """Return the number of entries for ``size`` elements, given ``entries`` per block; halves round up.

    Example:
        >>> share(4, 512, 512), share(4, 700, 512), share(1, 256, 512)
        (4, 5, 1)
    """
    return (2 * entries * size + block) // (2 * block)


def per_block(k: int, size: int, block: int) -> int:
    """Return the smallest number of entries per block, at most ``block``, that selects k elements.

    k is itself a rounded number.  For example, 4 entries per block of 512 give k = 7818 for 1,000,700
    elements, so for 7818 this function must return 4.

    Example:
        >>> per_block(7818, 1_000_700, 512), per_block(7819, 1_000_700, 512)
        (4, 5)
    """
    return min(-(-(2 * k - 1) * block // (2 * size)), block)


def _largest(keys: Tensor, entries: int) -> Tensor:
    """Mark the ``entries`` largest nonzero keys of every row; ties go to the lower column."""
    if keys.numel() == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    least = torch.topk(keys, entries, dim=1, sorted=False).values.amin(1, keepdim=True)
    # 1 is the key of the smallest magnitude above zero, so zeros are never marked
    marked = keys >= least.clamp(min=1)
    full = (marked.sum(1) > entries).nonzero().flatten()  # rows in which more entries tie than fit
    if full.numel():
        above, ties = keys[full] > least[full], keys[full] == least[full]
        room = entries - above.sum(1, keepdim=True)
        marked[full] = above | (ties & (ties.cumsum(1) <= room))
    return marked
