"""What a matrix is made of: rows, and one cell per column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["COLUMNS", "Cell", "Row", "absent", "refused", "untested", "works"]

Verdict = Literal["works", "refused", "not applicable", "untested"]

COLUMNS = ("attach", "LocalUpdates", "UpdateSpace", "averaging")


@dataclass(frozen=True)
class Cell:
    """What one integration does with one thing.

    Attributes:
        verdict: it works, or is refused with an error; "untested" is neither, and says so.
        says: for the reader, one sentence.
        proof: "case NAME" (``cases.py``), "FILE.FUNCTION" of this folder, or a test elsewhere,
            "tests/FILE.py::NAME"; nothing where the thing does not exist.
    """

    verdict: Verdict
    says: str
    proof: str = ""


@dataclass(frozen=True)
class Row:
    """One thing that training scripts do.

    Attributes:
        name: of it.
        attach: a DDP model.
        local: ``LocalUpdates``.
        update: ``UpdateSpaceSGD`` and ``UpdateSpaceAdamW``.
        averaging: ``sparsync.averaging``.
    """

    name: str
    attach: Cell
    local: Cell
    update: Cell
    averaging: Cell

    @property
    def cells(self) -> dict[str, Cell]:
        """The cells by column."""
        return dict(
            zip(COLUMNS, (self.attach, self.local, self.update, self.averaging), strict=True)
        )


def works(proof: str, says: str) -> Cell:
    return Cell("works", says, proof)


def refused(proof: str, says: str) -> Cell:
    return Cell("refused", says, proof)


def absent(says: str) -> Cell:
    return Cell("not applicable", says)


def untested(proof: str, says: str) -> Cell:
    return Cell("untested", says, proof)
