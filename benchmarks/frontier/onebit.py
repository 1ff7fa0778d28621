"""1-bit Adam as in its paper: dense Adam, then signs of momentum divided by a frozen second moment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.collectives import Quantised
from sparsync.sparse import DenseVector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run


class OneBitAdam(torch.optim.Optimizer):
    """Algorithm 1 of 1-bit Adam, with decoupled decay.

    ::

        m = b1 m + (1 - b1) g                         g: averaged before T, this rank's own from T on
        v = b2 v + (1 - b2) g^2                       before T only
        m = two-stage 1-bit average of m              from T on; errors are kept at worker and server
        w = w - lr (m' / (sqrt(v') + eps) + decay w)  m', v': corrected for bias

    Args:
        groups: parameter groups, with their "weight_decay".
        comm: communicator that carries the momentum.
        dense_steps: T, the number of warm-up steps, in which gradients are already averaged.
        lr: the learning rate.
        betas: decay rates of both moments.
        block: consecutive elements that share a scale.
        eps: number added to the denominator.

    Differs from the paper: each block, not each chunk, has a scale. One vector holds both errors.
    The second moment v is corrected for bias, because this matters after only 60 warm-up steps.
    Elements whose v is 0 do not change.

    References: Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, ICML 2021.
    """

    def __init__(
        self,
        groups: Sequence[dict],
        comm: Communicator,
        dense_steps: int,
        lr: float,
        betas: tuple[float, float],
        block: int,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.comm, self.dense_steps, self.betas, self.eps = comm, dense_steps, betas, eps
        self.collective, self.steps = Quantised(bits=1, block=block), 0
        size = sum(p.numel() for group in self.param_groups for p in group["params"])
        self.mean, self.square, self.error = (torch.zeros(size) for _ in range(3))

    @property
    def is_dense(self) -> bool:
        """Whether the next step belongs to the warm-up."""
        return self.steps < self.dense_steps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Do one step."""
        parameters = [(p, group) for group in self.param_groups for p in group["params"]]
        gradient = torch.cat([p.grad.flatten() for p, _ in parameters])
        beta1, beta2 = self.betas
        self.mean.lerp_(gradient, 1 - beta1)
        if self.is_dense:
            self.square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        else:
            self.mean = run(self._average(self.mean))
        self.steps += 1
        variance = self.square / (1 - beta2 ** min(self.steps, self.dense_steps))
        update = self.mean / (1 - beta1**self.steps) / variance.sqrt_().add_(self.eps)
        update[self.square == 0] = 0.0
        pieces = update.split([p.numel() for p, _ in parameters])
        for (p, group), piece in zip(parameters, pieces, strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(piece.view_as(p), alpha=group["lr"])

    async def _average(self, momentum: Tensor) -> Tensor:
        """Average signs in two rounds; keep the rounding errors of both rounds."""
        accumulated = momentum + self.error
        reduced = await self.collective.reduce(
            self.comm, DenseVector(accumulated), len(accumulated), self.steps
        )
        self.error = accumulated - reduced.delivered.to_dense()
        return reduced.total.to_dense() / self.comm.world_size
