"""Momentum, weight decay and clipping, applied to the local gradient before it is accumulated.

Error feedback delays entries; a momentum that is applied after the exchange is wrong for those that
waited.  Momentum correction accumulates the *velocity* instead of the gradient: the entries that
arrive late bring their momentum with them.  Weight decay and clipping move with it.

References: Lin et al., Deep Gradient Compression, ICLR 2018, section 3; Fang et al., RedSync,
sections 5.5, 5.6 and Algorithm 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.sparse import SparseVector, Vector

__all__ = ["Clipper", "Correction", "Velocity"]


@dataclass(frozen=True)
class Correction:
    """Settings of what is done to a local gradient before it is accumulated: clip, decay, momentum.

    The optimizer then is plain SGD: momentum and decay are not applied twice (``attach`` checks the
    optimizer that it is given).  A parameter that no rank used in a step (``find_unused_parameters``)
    still decays and moves by its velocity; torch's SGD passes over it.

    Attributes:
        momentum: m in [0, 1).
        nesterov: ``U = m (U + g); V = V + U + g``, which is torch's Nesterov; plain is
            ``U = m U + g; V = V + U``.
        masking: forget the velocity of entries that were delivered (momentum factor masking).  What
            is exchanged whole (dense warm-up, small layers) keeps its velocity: it was never late.
        weight_decay: ``g = g + weight_decay w``.
        clip: largest norm of the *averaged* gradient, in its own units; None: no clipping.
        clip_norm: "this": all gradients of the step are waited for, and nothing overlaps with the
            backward pass (RedSync's scheme for RNNs); "previous": the norm of the last step.
        as_published: clip local gradients to ``clip / sqrt(P)``, which is right for gradients that were
            already divided by P; here they are not, and are clipped to ``clip sqrt(P)``.

    Differs from the paper: decay reaches the residual (Algorithm 4 adds it to a gradient that it then
    does not use); Nesterov as torch has it; masking spares what is exchanged whole.

    Example:
        >>> Correction(clip=1.0).clip_scale(norm=8.0, world_size=4)
        0.25
    """

    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    weight_decay: float = 0.0
    clip: float | None = None
    clip_norm: Literal["this", "previous"] = "this"
    as_published: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum is {self.momentum}; give a factor in [0, 1)")
        if self.nesterov and not self.momentum:
            raise ConfigurationError("nesterov=True needs a momentum > 0, as torch.optim.SGD does")
        if not self.weight_decay >= 0:
            raise ConfigurationError(f"weight_decay is {self.weight_decay}; give a factor >= 0")
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"clip is {self.clip}; give a norm > 0, or None")
        if self.clip_norm not in ("this", "previous"):
            raise ConfigurationError(
                f"clip_norm is {self.clip_norm!r}; choose the norm of this or of the previous step"
            )

    def clip_scale(self, norm: float, world_size: int) -> float:
        """Return by what a local gradient of this norm is multiplied, at most 1.

        P independent local gradients of norm x have an average of norm ``x / sqrt(P)``: a local norm
        of ``clip sqrt(P)`` is a global one of ``clip``.
        """
        if self.clip is None or not norm > 0:  # a NaN is not clipped away: the step is refused
            return 1.0
        root = math.sqrt(world_size)
        local = self.clip / root if self.as_published else self.clip * root
        return min(1.0, local / norm)


class Clipper:
    """Local gradient clipping on one rank.

    Args:
        correction: what to clip to.
        world_size: number of ranks P.

    Attributes:
        previous: norm of the last step's local gradient, None before the first.
        scale: by which gradients are multiplied (a GradScaler's); norms are those without it.
    """

    def __init__(self, correction: Correction, world_size: int) -> None:
        self.correction, self.world_size = correction, world_size
        self.scale = 1.0
        self.previous: float | None = None
        self._scale: float | None = None
        self._squares = 0.0

    @property
    def waits(self) -> bool:
        """Whether ``measure`` is to see all gradients of the step before the first is clipped."""
        if self.correction.clip is None:
            return False
        return self.correction.clip_norm == "this" or self.previous is None

    def measure(self, gradients: Iterable[Tensor]) -> None:
        """Learn the norm of all gradients of the open step."""
        norm = math.sqrt(sum(_square(gradient) for gradient in gradients)) / self.scale
        self._scale = self.correction.clip_scale(norm, self.world_size)

    def clip_(self, gradient: Tensor) -> None:
        """Scale one piece of the open step's gradient."""
        if self.correction.clip is None:
            return
        if self.waits:
            assert self._scale is not None, "measure all gradients first"
            scale = self._scale
        else:
            assert self.previous is not None
            scale = self.correction.clip_scale(self.previous, self.world_size)
        if self.correction.clip_norm == "previous":
            self._squares += _square(gradient)
        if scale < 1:
            gradient.mul_(scale)

    def commit(self) -> None:
        """Close the step."""
        if self.correction.clip is not None and self.correction.clip_norm == "previous":
            self.previous = math.sqrt(self._squares) / self.scale
        self.restore()

    def restore(self) -> None:
        """Forget the open step."""
        self._scale, self._squares = None, 0.0


class Velocity:
    """The velocity of one unit on one rank.

    Memory: 2 n elements where there is momentum: a step that is refused is undone exactly.

    Args:
        correction: decay, momentum and masking.
        size: elements of the unit.
        dtype: of its residual.
        device: likewise.

    Example:
        >>> velocity = Velocity(Correction(momentum=0.5), 2, torch.float32, torch.device("cpu"))
        >>> gradient = torch.tensor([1.0, 2.0])
        >>> velocity.correct_(0, gradient); velocity.retain(SparseVector.empty(2, gradient))
        >>> gradient = torch.tensor([1.0, 2.0]); velocity.correct_(0, gradient); gradient.tolist()
        [1.5, 3.0]
    """

    def __init__(
        self, correction: Correction, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.correction = correction
        self.scale = 1.0  # by which gradients are multiplied (a GradScaler's)
        kept = size if correction.momentum else 0
        self.value = torch.zeros(kept, dtype=dtype, device=device)
        self._next = torch.zeros_like(self.value)

    def correct_(self, start: int, gradient: Tensor, weights: Tensor | None = None) -> None:
        """Turn a local gradient into what is accumulated; ``weights`` are needed for decay."""
        momentum, decay = self.correction.momentum, self.correction.weight_decay
        if decay:
            if weights is None:
                raise ConfigurationError(
                    "weight_decay needs the weights together with their gradient"
                )
            gradient.add_(weights.reshape(-1), alpha=decay * self.scale)
        if not momentum:
            return
        stop = start + gradient.numel()
        before, after = self.value[start:stop], self._next[start:stop]
        if self.correction.nesterov:
            torch.add(before, gradient, out=after).mul_(momentum)
            gradient.add_(after)
        else:
            torch.add(gradient, before, alpha=momentum, out=after)
            gradient.copy_(after)

    def retain(self, delivered: Vector) -> None:
        """Close the step: keep the new velocity, but for what was delivered."""
        if not self.correction.momentum:
            return
        self.value, self._next = self._next, self.value
        if self.correction.masking and isinstance(delivered, SparseVector):
            self.value[delivered.indices] = 0

    def scale_(self, factor: float) -> None:
        """Multiply the velocity between steps, when the gradients' units change."""
        self.value.mul_(factor)

    def load(self, value: Tensor | None) -> None:
        """Set the velocity between steps; None for zeros."""
        if value is None:
            self.value.zero_()
        else:
            self.value.copy_(value)


def _square(gradient: Tensor) -> float:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return float(torch.linalg.vector_norm(gradient, dtype=wide)) ** 2
