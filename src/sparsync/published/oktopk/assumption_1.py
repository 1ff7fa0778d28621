"""Ok-Topk's Assumption 1, evaluated on all ranks' vectors: the distance from the true top-k."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync import kernels

__all__ = ["xi"]


def xi(
    accumulated: Sequence[Tensor], gradients: Sequence[Tensor], k: int, *, reselect: bool = True
) -> float:
    """Return the smallest xi for which Assumption 1 (Equation 5) holds on one step.

    It is ``|Topk(mean of a) - Topk(mean of Topk(a))| / |mean of g|``, where the means are over the
    ranks, a is ``accumulated`` and g is ``gradients``.  The learning rate cancels if it is applied to
    both or to neither.  ``sparsync.monitoring.XiProbe`` estimates the same quantity from samples during
    training.

    Args:
        accumulated: each rank's residual plus gradient, `[n]`, before selection.
        gradients: the ranks' gradients, `[n]` each.
        k: number of entries selected, on each rank and from the sum.
        reselect: whether the second term has its outer Topk; SparCML's Assumption C.2 has none.

    Returns:
        xi >= 0; infinity if the mean gradient is zero and the two vectors differ.

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, section 4.1; Renggli et al., SparCML, SC 2019,
    appendix C.

    Example:
        >>> ranks = [torch.tensor([3.0, 0.0, 2.0]), torch.tensor([-3.0, 0.0, 2.0])]
        >>> xi(ranks, ranks, k=1)  # both ranks send what cancels, and keep what does not
        1.0
    """
    wanted = _top(torch.stack([*accumulated]).mean(0), k)
    reached = torch.stack([_top(mine, k) for mine in accumulated]).mean(0)
    if reselect:
        reached = _top(reached, k)
    lacking, gradient = (wanted - reached).norm(), torch.stack([*gradients]).mean(0).norm()
    if not gradient:
        return math.inf if lacking else 0.0
    return float(lacking / gradient)


def _top(values: Tensor, k: int) -> Tensor:
    """Return a copy that keeps the k largest entries and has zeros elsewhere."""
    chosen, positions = torch.zeros_like(values), kernels.top(values, k)
    chosen[positions] = values[positions]
    return chosen
