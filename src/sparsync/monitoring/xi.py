"""The constant xi of Ok-Topk's Assumption 1, and gradient noise, from a sample of the coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.base import Communicator
from sparsync.units import Unit

__all__ = ["Measured", "XiProbe"]


@dataclass(frozen=True)
class Measured:
    """What one measurement gave; the same on all ranks, bit for bit.

    Attributes:
        xi: what this step's average lacks of the k largest entries of the mean of all that ranks had
            accumulated, in norms of the mean gradient.  Below P it is harmless (section 5.1).
        signal_to_noise: of the mean gradient: square norm of its expectation over that of its noise,
            which comes from batches being finite; 0 where noise is all, infinite where there is none
            (world_size 1 shows none).
    """

    xi: float
    signal_to_noise: float


@final
class XiProbe:
    """Estimates xi every ``period`` steps, on one random coordinate of every ``every``.

    ::

        xi = | TopK(mean of accumulated) - average | / | mean of gradients |         (equation 5)

    ``average`` is what is applied: in Ok-Topk it is TopK(mean of TopK(accumulated)) as published; with
    other collectives and codecs whatever they made of it, rounding included.  Learning rates cancel.
    Means and norms are those of the sample, whose coordinates are the same on all ranks, drawn anew
    for every measurement: one from every run of ``every`` elements.

    Args:
        period: steps between measurements; None: never.
        units: of the reducer; those that are exchanged whole are left out.
        start: the first step that may be measured: none is while all is exchanged whole.
        every: elements per sampled one (ours); 1 is exact.
        seed: of the samples; equal on all ranks.

    Cost: an allreduce of ``2 n / every + 1`` words beside the exchange, every ``period`` steps.  About
    ``k / every`` of the largest entries are in the sample, so the relative deviation of the estimate is
    about ``(every / k) ** 0.5``.
    State: none outlives the step.

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, section 4, Assumption 1 and Figure 5.
    """

    def __init__(
        self,
        period: int | None,
        units: Sequence[Unit],
        *,
        start: int = 0,
        every: int = 64,
        seed: int = 0,
    ) -> None:
        if period is not None and (type(period) is not int or period < 1):
            raise ConfigurationError(
                f"xi_period is {period!r}; give a whole number of steps >= 1, or None"
            )
        self.period, self.start, self.every, self.seed = period, start, every, seed
        self.sizes = [0 if unit.dense else unit.size for unit in units]
        self._step: int | None = None
        self._samples: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._sums: Tensor | None = None

    def due(self, step: int) -> bool:
        """Tell whether a step is measured."""
        return self.period is not None and step >= self.start and step % self.period == 0

    def accumulate(self, step: int, unit: int, start: int, gradient: Tensor) -> None:
        """Note a gradient before it is accumulated, as ``Reducer.accumulate`` gets it."""
        if step != self._step:
            self._open(step)
        sample = self._samples[unit]
        bounds = torch.tensor([start, start + gradient.numel()])
        low, high = torch.searchsorted(sample, bounds).tolist()
        here = (sample[low:high] - start).to(gradient.device, non_blocking=True)
        self._gradients[unit] = self._gradients[unit].to(gradient)
        self._gradients[unit][low:high] = gradient[here]

    async def share(self, comm: Communicator, accumulated: Sequence[Tensor]) -> None:
        """Sum the sample over ranks: of what is accumulated, of the gradients, and their squares."""
        pairs = zip(accumulated, self._samples, strict=True)
        sampled = [unit[sample.to(unit.device, non_blocking=True)] for unit, sample in pairs]
        parts = [part.to(comm.device, torch.float32) for part in (*sampled, *self._gradients)]
        squares = torch.cat(parts[len(sampled) :]).double().square().sum().float()
        self._sums = await comm.allreduce(torch.cat([*parts, squares.view(1)]), "xi")

    def measure(
        self, totals: Sequence[Vector], quotas: Sequence[int], world_size: int
    ) -> Measured | None:
        """Compare with what was delivered; None if no rank had a gradient.

        Args:
            totals: of every unit, before they are divided by ``world_size``.
            quotas: k of every unit.
            world_size: P.
        """
        assert self._sums is not None, "share comes first"
        drawn = sum(sample.numel() for sample in self._samples)
        sums = self._sums.double()
        accumulated, gradients = sums[:drawn], sums[drawn:-1]
        pairs = zip(totals, self._samples, strict=True)
        lacking = -torch.cat([_at(total, sample) for total, sample in pairs]).double()
        k = sum(quota for quota, size in zip(quotas, self.sizes, strict=True) if size)
        largest = kernels.top(accumulated, math.ceil(k * drawn / max(sum(self.sizes), 1)))
        lacking[largest] += accumulated[largest]
        square = _square(gradients)
        if not square > 0:
            return None
        xi = math.sqrt(_square(lacking) / square)
        return Measured(xi, _signal_to_noise(square, float(sums[-1]), world_size))

    def _open(self, step: int) -> None:
        """Draw the sample of a step."""
        self._step, self._sums = step, None
        generator = torch.Generator().manual_seed(self.seed + step)
        self._samples = []
        for size in self.sizes:
            runs = torch.arange(0, size, self.every)
            drawn = runs + torch.randint(self.every, runs.shape, generator=generator)
            self._samples.append(drawn[drawn < size])  # the last run may be shorter
        self._gradients = [torch.zeros(sample.shape) for sample in self._samples]


def _square(x: Tensor) -> float:
    """Return the square norm, correctly rounded: the same on processors that add in other orders."""
    return math.fsum(x.square().tolist())


def _at(total: Vector, indices: Tensor) -> Tensor:
    """Return the elements at ascending indices, on the CPU."""
    where = indices.to(total.values.device)
    if isinstance(total, DenseVector):
        return total.values[where].cpu()
    here = total.restrict(where)
    values = total.values.new_zeros(indices.shape)
    values[torch.searchsorted(where, here.indices)] = here.values
    return values.cpu()


def _signal_to_noise(square_of_sum: float, sum_of_squares: float, ranks: int) -> float:
    """Return ``|E g|^2 / (Var g / P)``, unbiased in both, from P independent gradients g.

    Example:
        >>> _signal_to_noise(16.0, 4.0, 4)  # four equal gradients of norm 1
        inf
    """
    mean, each = square_of_sum / ranks**2, sum_of_squares / ranks
    noise = (each - mean) / (ranks - 1) if ranks > 1 else 0.0  # of the mean
    return max(mean - noise, 0.0) / noise if noise > 0 else math.inf
