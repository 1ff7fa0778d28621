"""All proofs of the matrix that need several ranks, in one start of two processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist

from . import backward_cells, ddp_cells, local_cells, uneven_cells
from .cases import CASES
from .training import keeps_its_meaning

CELLS = (backward_cells, ddp_cells, local_cells, uneven_cells)
MODULES = {module.__name__.rpartition(".")[2]: module for module in CELLS}


def find(column: str, proof: str) -> Callable[[], None]:
    """Return what runs a proof: "case NAME", or "FILE.FUNCTION" of this folder."""
    kind, _, name = proof.partition(" ")
    if kind == "case":
        return lambda: keeps_its_meaning(CASES[name], column)
    module, _, name = proof.partition(".")
    found: Callable[[], None] = getattr(MODULES[module], name)
    return found


def run(proofs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Run proofs of (column, proof); return what the ranks said, nothing where it holds."""
    said = {}
    for column, proof in proofs:
        mine = ""
        try:
            find(column, proof)()
        except BaseException:
            mine = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        said[column, proof] = "".join(everyone)
    return said
