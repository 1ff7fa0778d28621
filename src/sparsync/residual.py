"""Error feedback: what was not delivered is kept and added to the next gradient.

Two buffers per unit take turns: while a step is open, ``accumulated`` is written beside the
residual, which stays untouched until ``commit`` swaps them.  A refused step just forgets
``accumulated``: nothing is ever lost, and nothing has to be undone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.sparse import DenseVector, Vector

__all__ = ["Residual"]


class Residual:
    """The residual of one unit and the accumulated gradient of the open step.

    Attributes:
        value: `[n]` what has not been delivered yet; None stands for zeros.
        accumulated: `[n]` residual + gradient of the open step.

    Both are float32 where gradients have 16 bits: in bfloat16 a residual of 256 times a gradient no
    longer grows when that is added, and mass would vanish before the law begins.

    Memory: 2 n elements; n for an algorithm that delivers everything.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.value: Tensor | None = None
        wide = torch.promote_types(dtype, torch.float32)
        self.accumulated = torch.zeros(size, dtype=wide, device=device)

    def accumulate(self, start: int, gradient: Tensor) -> None:
        """``accumulated = residual + gradient`` on ``[start, start + len(gradient))``."""
        stop = start + gradient.numel()
        before = None if self.value is None else self.value[start:stop]
        kernels.accumulate(gradient, before, self.accumulated[start:stop])

    def retain(self, delivered: Vector) -> None:
        """``residual = accumulated - delivered``: the commit of a step."""
        if isinstance(delivered, DenseVector) and delivered.values is self.accumulated:
            self.value = None  # everything was delivered
            return
        delivered.subtract_from_(self.accumulated)
        spare = torch.zeros_like(self.accumulated) if self.value is None else self.value
        self.value, self.accumulated = self.accumulated, spare
