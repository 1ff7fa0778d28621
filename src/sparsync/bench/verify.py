"""What a bench checks on every step: the sum, its equality on all ranks, and the law of conservation."""

from __future__ import annotations

import hashlib
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.sparse import DenseVector, SparseVector, Vector

__all__ = ["VECTORS", "Evidence", "Verdict", "Verification", "digest"]

VECTORS = 6  # that make up a rank's evidence

_ROUNDING = 2.0**-24  # half a unit in the last place of float32
_TINY = 2.0**-150  # below every float32: where nothing was accumulated, nothing may differ


@dataclass(frozen=True)
class Evidence:
    """What one rank saw in one step; see the life of a gradient in ``sparsync.reducer``.

    Attributes:
        accumulated: `[n]`, the residual of the last step plus the gradient, computed apart.
        residual: `[n]`, after the commit.
        selected: what entered the collective.
        delivered: what the collective says that this rank delivered.
        total: what the collective returned as the sum.
        lost: what of ``delivered`` was rounded away and is kept by nobody, on purpose.
    """

    accumulated: Tensor
    residual: Tensor
    selected: Vector
    delivered: Vector
    total: Vector
    lost: Vector

    def write_(self, packed: Tensor) -> None:
        """Write everything into one `[6, n]` tensor, to be brought to who verifies."""
        vectors = (v.to_dense() for v in (self.selected, self.delivered, self.total, self.lost))
        for row, vector in zip(packed, (self.accumulated, self.residual, *vectors), strict=True):
            row.copy_(vector)

    @staticmethod
    def unpack(packed: Tensor) -> Evidence:
        """Undo ``write_``; the vectors come back dense."""
        accumulated, residual, *vectors = packed
        return Evidence(accumulated, residual, *(DenseVector(v) for v in vectors))


class Verdict(NamedTuple):
    """The outcome of one step.

    Attributes:
        wrong: entries of the total that differ between ranks or from the sum of what was delivered.
        law_error: the largest |sum(accumulated) - total - sum(residual) - sum(lost)| in units of its
            tolerance ``(P + 2) 2^-24 sum (max(|accumulated|, |delivered|) + |lost|)``; above 1 the law
            is broken.
        entries: entries of the total / min(k, entries of the sum of what was selected); 1 if dense.
    """

    wrong: int
    law_error: float
    entries: float

    @staticmethod
    def of_totals(k: int, selected: int, total: Vector, digests: Set[int]) -> Verdict:
        """Judge a step by its totals alone: no law; ``wrong`` counts at least one if they differ.

        Args:
            k: number of entries asked for.
            selected: the most entries that any rank selected; so many the sum has, barring sums of 0.
            total: any rank's.
            digests: of all ranks' totals.
        """
        wanted = min(k, selected)
        full = not isinstance(total, SparseVector) or not wanted
        return Verdict(len(digests) - 1, 0.0, 1.0 if full else total.values.numel() / wanted)


def digest(total: Vector) -> int:
    """Return 63 bits that two totals share only if they are bit-identical.

    Example:
        >>> one, other = (DenseVector(torch.tensor([x, 0.0])) for x in (1.0, 2.0))
        >>> digest(one) == digest(one), digest(one) == digest(other)
        (True, False)
    """
    state = hashlib.sha256()
    if isinstance(total, SparseVector):
        state.update(total.indices.contiguous().numpy().data)
    state.update(total.values.contiguous().numpy().data)
    return int.from_bytes(state.digest()[:8], "little") >> 1


class Verification:
    """Collects the evidence of all ranks, in rank order, in O(n) memory.

    Totals must be equal on all ranks, and equal to the sum of what was delivered to the law's
    tolerance: the tree of additions, and where a codec rounds, are the collective's own.  (That some
    sums are left folds, bit for bit, is the contract's business: ``sparsync.testing``.)

    Args:
        size: number of elements n.
        world_size: number of ranks P.
        k: number of entries asked for.

    Example:
        >>> one = DenseVector(torch.tensor([1.0, 0.0]))
        >>> check = Verification(size=2, world_size=1, k=2)
        >>> zeros = torch.zeros(2)
        >>> check.add(Evidence(one.values, zeros, one, one, one, DenseVector(zeros)))
        >>> check.verdict()
        Verdict(wrong=0, law_error=0.0, entries=1.0)
    """

    def __init__(self, size: int, world_size: int, k: int) -> None:
        self.k, self.unit = k, (world_size + 2) * _ROUNDING
        self.accumulated = torch.zeros(size, dtype=torch.float64)
        self.magnitude = torch.zeros(size, dtype=torch.float64)
        self.residual = torch.zeros(size, dtype=torch.float64)
        self.delivered = torch.zeros(size, dtype=torch.float64)
        self.selected = torch.zeros(size)
        self.differs = torch.zeros(size, dtype=torch.bool)
        self.total: Vector | None = None

    def add(self, evidence: Evidence) -> None:
        """Add the next rank's evidence."""
        lost = evidence.lost.to_dense().double()
        self.accumulated += evidence.accumulated
        delivered = evidence.delivered.to_dense()
        # a codec may deliver more than an entry has (a mean): roundings are relative to that
        self.magnitude += evidence.accumulated.abs().maximum(delivered.abs()) + lost.abs()
        self.residual += evidence.residual + lost
        self.delivered += delivered - lost
        self.selected += evidence.selected.to_dense()
        if self.total is None:
            self.total = evidence.total
        else:
            self.differs |= evidence.total.to_dense() != self.total.to_dense()

    def verdict(self) -> Verdict:
        """Judge the step."""
        assert self.total is not None
        total, tolerance = self.total.to_dense().double(), self.unit * self.magnitude
        wrong = self.differs | ~((total - self.delivered).abs() <= tolerance)
        difference = (self.accumulated - total - self.residual).abs()
        errors = difference / tolerance.clamp(min=_TINY)
        worst = torch.finfo(errors.dtype).max  # stands for NaN, which JSON does not know
        errors = errors.nan_to_num(nan=worst, posinf=worst)
        law_error = float(errors.max()) if errors.numel() else 0.0
        return Verdict(int(wrong.sum()), law_error, self._entries())

    def _entries(self) -> float:
        wanted = min(self.k, int(self.selected.count_nonzero()))
        if isinstance(self.total, SparseVector) and wanted:
            return self.total.nnz / wanted
        return 1.0
