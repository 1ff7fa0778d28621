"""Momentum, weight decay and clipping, applied to the local gradient before it is accumulated.

Error feedback delays entries, and momentum applied after the exchange is wrong for delayed entries.
Momentum correction accumulates the *velocity* instead of the gradient, so that entries which arrive late
bring their momentum with them.  Weight decay and clipping are applied at the same point.

References: Lin et al., Deep Gradient Compression, ICLR 2018, section 3; Fang et al., RedSync,
sections 5.5, 5.6 and Algorithm 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, check_number_fields, require
from sparsync.names import naming_options
from sparsync.sparse import SparseVector, Vector
from sparsync.units import Unit

__all__ = ["Correction", "Corrector"]


@naming_options
@dataclass(frozen=True)
class Correction:
    """Clipping, weight decay and momentum, applied to a local gradient before it is accumulated.

    The optimizer must then be plain SGD, so that momentum and decay are not applied twice (``attach``
    checks the optimizer that it is given).  If no rank used a parameter in a step
    (``find_unused_parameters``), decay and velocity still change the parameter; torch's SGD would skip
    it.

    Attributes:
        momentum: m in [0, 1).
        nesterov: ``U = m (U + g); V = V + U + g``, which is torch's Nesterov momentum; otherwise ``U =
            m U + g; V = V + U``.
        masking: reset the velocity of delivered entries (momentum factor masking).
            Parameters that are exchanged whole (dense warm-up, small layers) keep their velocity, because
            their entries are never late.
        weight_decay: ``g = g + weight_decay w``.
        clip: maximum norm of the *averaged* gradient, without a GradScaler's factor; None for no
            clipping.  The average of P independent local gradients of norm x has norm ``x / sqrt(P)``.
        clip_norm: the norm by which gradients are clipped.  "this" uses the norm of the current step.
            The exchange must then wait for all gradients, so nothing overlaps with the backward pass
            (RedSync's scheme for RNNs).  "previous" uses the norm of the last step.

    Differs from the paper: decay reaches the residual (Algorithm 4, line 9, adds it to a gradient that
    lines 12 to 18 do not use).  Nesterov momentum is torch's.  Masking spares parameters that are
    exchanged whole.  Local gradients are clipped at ``clip sqrt(P)`` (``clip / sqrt(P)`` in section 5.5
    is for gradients already divided by P).

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

    def __post_init__(self) -> None:
        check_number_fields(self)
        momentum, decay, clip = self.momentum, self.weight_decay, self.clip
        require(0 <= momentum < 1, f"momentum is {momentum}; give a factor in [0, 1)")
        require(
            momentum > 0 or not self.nesterov,
            "nesterov=True needs a momentum > 0, as torch.optim.SGD does",
        )
        require(0 <= decay < math.inf, f"weight_decay is {decay}; give a factor >= 0")
        require(clip is None or clip > 0, f"clip is {clip}; give a norm > 0, or None")
        require(
            self.clip_norm in ("this", "previous"),
            f"clip_norm is {self.clip_norm!r}; choose the norm of this or of the previous step",
        )

    def clip_scale(self, norm: float, world_size: int) -> float:
        """Return the factor, at most 1, that clips a local gradient with this norm."""
        if self.clip is None or not norm > 0:  # NaN is not clipped; the step will be refused
            return 1.0
        # the average of P independent gradients of norm x has norm x / sqrt(P), so the limit for each is
        # sqrt(P) times as large
        return min(1.0, self.clip * math.sqrt(world_size) / norm)


@final
class Corrector:
    """Corrects the local gradients of one rank; a refused step leaves its memory unchanged.

    Memory: 2 n elements with momentum.

    Example:
        >>> from sparsync.units import plan_units
        >>> (unit,) = plan_units([("w", torch.zeros(2))])
        >>> corrector = Corrector(Correction(momentum=0.5), [unit], world_size=1)
        >>> gradient = torch.tensor([1.0, 2.0])
        >>> none = [SparseVector.empty(2, gradient)]
        >>> corrector.correct_(0, 0, gradient); corrector.retain(none, none)
        >>> gradient = torch.tensor([1.0, 2.0]); corrector.correct_(0, 0, gradient); gradient.tolist()
        [1.5, 3.0]
    """

    def __init__(self, correction: Correction, units: Sequence[Unit], world_size: int) -> None:
        self.correction, self.world_size = correction, world_size
        self.scale = 1.0  # a GradScaler's factor on gradients; norms are stored without it
        self.previous_norm: float | None = None  # norm of the last step's local gradient
        self._norm: float | None = None  # norm of the open step, if measured
        self._squares = 0.0
        self.velocities = []  # the velocity of every unit, [n]; an empty tensor without momentum
        for unit in units:
            wide = torch.promote_types(unit.dtype, torch.float32)
            size = unit.size if correction.momentum else 0
            self.velocities.append(torch.zeros(size, dtype=wide, device=unit.device))
        # A step writes to this second buffer, and a commit swaps the two. If the step is refused, nothing
        # is swapped, so the step is undone exactly. The price is 2 n elements in all.
        self._next = [torch.zeros_like(velocity) for velocity in self.velocities]

    @property
    def waits(self) -> bool:
        """Whether ``measure`` must see all gradients of the step before any of them is clipped."""
        if self.correction.clip is None:
            return False
        return self.correction.clip_norm == "this" or self.previous_norm is None

    def measure(self, gradients: Iterable[Tensor]) -> None:
        """Measure the norm of all gradients of the open step."""
        self._norm = math.sqrt(sum(_square(gradient) for gradient in gradients)) / self.scale

    def correct_(
        self, unit: int, start: int, gradient: Tensor, weights: Tensor | None = None
    ) -> None:
        """Correct a run of a unit's gradient in place; the run begins at element ``start``."""
        # The order is clip, decay, momentum, as in torch (clip_grad_norm_, then SGD).  The decay is
        # not clipped, and enters velocity and residual together with the gradient.
        self._clip_(gradient)
        momentum, decay = self.correction.momentum, self.correction.weight_decay
        if decay:
            if weights is None:
                raise ConfigurationError(
                    "weight_decay needs the weights together with their gradient"
                )
            # a GradScaler has multiplied the gradients, so the decay must also be multiplied
            gradient.add_(weights.reshape(-1), alpha=decay * self.scale)
        if not momentum:
            return
        here = slice(start, start + gradient.numel())
        before, after = self.velocities[unit][here], self._next[unit][here]
        if self.correction.nesterov:
            # U = m (U + g); accumulate g + U, which for U = m buf is torch's g + m (m buf + g)
            torch.add(before, gradient, out=after).mul_(momentum)
            gradient.add_(after)
        else:
            # U = m U + g; accumulate U
            torch.add(gradient, before, alpha=momentum, out=after)
            gradient.copy_(after)

    def _clip_(self, gradient: Tensor) -> None:
        if self.correction.clip is None:
            return
        norm = self._norm if self.waits else self.previous_norm
        assert norm is not None, "measure all gradients first"
        if self.correction.clip_norm == "previous":
            self._squares += _square(gradient)
        scale = self.correction.clip_scale(norm, self.world_size)
        if scale < 1:
            gradient.mul_(scale)

    def retain(self, selected: Sequence[Vector], delivered: Sequence[Vector]) -> None:
        """Close the step: adopt the new velocities; with masking, reset them at delivered entries.

        ``selected`` and ``delivered`` hold one vector per unit.
        """
        if self.correction.momentum:
            self.velocities, self._next = self._next, self.velocities
        if self.correction.momentum and self.correction.masking:
            for velocity, mine, vector in zip(self.velocities, selected, delivered, strict=True):
                if isinstance(vector, SparseVector):
                    velocity[_sent(mine, vector)] = 0
        if self.correction.clip is not None and self.correction.clip_norm == "previous":
            self.previous_norm = math.sqrt(self._squares) / self.scale
        self.restore()

    def restore(self) -> None:
        """Discard the open step."""
        self._norm, self._squares = None, 0.0

    def load(
        self, velocities: Sequence[Tensor | None], previous_norm: float | None, scale: float
    ) -> None:
        """Set velocities (None for zeros), the last step's norm, and the scale, between steps."""
        self.previous_norm, self.scale = previous_norm, scale
        if self.correction.momentum:
            for velocity, value in zip(self.velocities, velocities, strict=True):
                velocity.zero_() if value is None else velocity.copy_(value)

    def rescale_(self, factor: float, scale: float) -> None:
        """Multiply the velocities by ``factor``, to adapt them to the new scale."""
        self.scale = scale
        for velocity in self.velocities:
            velocity.mul_(factor)


def _sent(selected: Vector, delivered: SparseVector) -> Tensor:
    """Return the indices of delivered entries that this rank has selected itself."""
    # ``delivered`` also holds entries that the rank takes back into its residual (``collective.less``).
    # These are the rounding errors of sums that the rank owns, and sums that it has dropped.  In such a
    # sum, other ranks' entries may outweigh the rank's own entry, which the opposite sign reveals.  If
    # ``delivered`` is a whole vector, nothing was taken back.  Its values must then not be read, because
    # their memory may already hold the new residual.
    if not isinstance(selected, SparseVector) or not delivered.nnz:
        return delivered.indices
    at = torch.searchsorted(delivered.indices, selected.indices).clamp_(max=delivered.nnz - 1)
    there = delivered.indices[at] == selected.indices
    return selected.indices[there & (delivered.values[at].sign() == selected.values.sign())]


def _square(gradient: Tensor) -> float:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return float(torch.linalg.vector_norm(gradient, dtype=wide)) ** 2
