"""How evidence comes to rank 0: through memory that the ranks of one machine share, or the network.

A full verification needs five vectors of every rank.  At n = 14.7 M and P = 8 these are 2.4 GB: 20 s
on a wire of 1 Gbit/s, behind every verified step.  Pages that all ranks map cost no wire at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.bench.verify import VECTORS, Evidence

__all__ = ["EvidenceRoom"]

_ITEM_BYTES = 4  # float32
_LONGEST_PATH = 4096  # bytes, as Linux has it
_IN_MEMORY = Path("/dev/shm")


@final
class EvidenceRoom:
    """Where ranks lay down what they saw and rank 0 reads it; every rank makes one, together.

    Args:
        group: of all ranks, not the one that is measured.
        size: the most elements n of any vector.

    Attributes:
        one_machine: all ranks map the same pages, and thus share a clock, too.

    State: the pages' files are deleted as soon as all have mapped them: nothing is left behind,
    however the ranks end.
    """

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.pages: list[Tensor] = []
        folder = self._share_folder()
        try:
            pages = self._map(folder, VECTORS * size)
            self.one_machine = self._all(pages is not None)
        finally:
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
        if self.one_machine and pages is not None:
            self.pages = pages

    def collect(self, mine: Evidence) -> Iterator[Evidence]:
        """Yield every rank's evidence, in rank order, on rank 0; nothing elsewhere; all call it."""
        size = mine.accumulated.numel()
        if not self.one_machine:
            yield from self._over_the_network(mine)
            return
        if self.rank != 0:
            mine.write_(_view(self.pages[self.rank], size))
        dist.barrier(group=self.group)
        if self.rank == 0:
            yield mine
            for page in self.pages[1:]:
                yield Evidence.unpack(_view(page, size))
        dist.barrier(group=self.group)  # the pages may be written anew

    def _over_the_network(self, mine: Evidence) -> Iterator[Evidence]:
        packed = torch.empty(VECTORS, mine.accumulated.numel())
        if self.rank != 0:
            mine.write_(packed)
            dist.send(packed, dst=0, group=self.group)
            return
        yield mine
        for source in range(1, self.ranks):
            dist.recv(packed, src=source, group=self.group)
            yield Evidence.unpack(packed)

    def _share_folder(self) -> Path:
        """Make a folder on rank 0, in memory where there is room; return its path on all ranks."""
        name = torch.zeros(_LONGEST_PATH, dtype=torch.uint8)
        if self.rank == 0:
            in_memory = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
            made = os.fsencode(tempfile.mkdtemp(prefix="sparsync-bench-", dir=in_memory))
            name[: len(made)] = torch.frombuffer(bytearray(made), dtype=torch.uint8)
        dist.broadcast(name, src=0, group=self.group)
        return Path(os.fsdecode(bytes(name.tolist()).rstrip(b"\0")))

    def _map(self, folder: Path, elements: int) -> list[Tensor] | None:
        """Make this rank's file and map everyone's; None where that cannot be."""
        mine = folder / str(self.rank)
        try:
            with mine.open("xb") as file:  # reserved at once: a full disk must not end in SIGBUS
                os.posix_fallocate(file.fileno(), 0, elements * _ITEM_BYTES)
            there = True
        except (OSError, AttributeError):  # no such folder here, no room, or another system
            there = False
        if not self._all(there):
            return None
        files = [folder / str(rank) for rank in range(self.ranks)]
        if not all(file.exists() for file in files):
            return None  # a folder of that name on another machine
        return [torch.from_file(str(f), shared=True, size=elements) for f in files]

    def _all(self, mine: bool) -> bool:
        """Tell whether it is true on all ranks."""
        everyone = torch.tensor([int(mine)])
        dist.all_reduce(everyone, op=dist.ReduceOp.MIN, group=self.group)
        return bool(everyone)


def _view(page: Tensor, size: int) -> Tensor:
    return page[: VECTORS * size].view(VECTORS, size)
