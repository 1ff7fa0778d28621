"""The matrix: the one source of the tests in this folder and of ``docs/semantics.md``."""

from __future__ import annotations

from .matrix import Row
from .rows_gradients import GRADIENTS, PRECISION
from .rows_models import MODELS
from .rows_training import LOOPS, OPTIMIZERS, SETTINGS

__all__ = ["TABLE", "cells"]

TABLE: dict[str, tuple[Row, ...]] = {
    "Gradients": GRADIENTS,
    "Precision and devices": PRECISION,
    "Models": MODELS,
    "DDP's settings, compilation": SETTINGS,
    "Loops": LOOPS,
    "Optimizers": OPTIMIZERS,
}


def cells() -> list[tuple[str, str, str]]:
    """Return (row, column, proof) of every cell that has a proof."""
    return [
        (row.name, column, cell.proof)
        for rows in TABLE.values()
        for row in rows
        for column, cell in row.cells.items()
        if cell.proof
    ]
