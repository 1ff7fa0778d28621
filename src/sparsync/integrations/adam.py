"""AdamW for local gradients, corrected as if its second moment were that of their average."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor

from sparsync.errors import require

__all__ = ["LocalAdamW", "check_adam"]


@final
class LocalAdamW(torch.optim.Optimizer):
    """AdamW on local gradients, whose second moment is that of their average over P ranks.

    ::

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2         of this rank's gradients
        v' = m^2 + (v - m^2) / P                                their noise is averaged away
        w = w - lr (m / (sqrt(v') + eps) + weight_decay w)      with m, v corrected for bias

    A local gradient is noisier than the average: with its own second moment, steps are up to sqrt(P)
    times shorter than those of dense training at the same learning rate.  P = 1 is torch's AdamW, whose
    arguments the others are.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = LocalAdamW([weight], world_size=4, lr=0.5, weight_decay=0.0)
        >>> weight.grad = torch.tensor([2.0]); optimizer.step(); weight.tolist()
        [0.5]
    """

    def __init__(
        self,
        params: Iterable[Any],
        world_size: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        require(world_size >= 1, f"world_size is {world_size}; give at least 1 rank")
        check_adam(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.world_size = world_size

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one optimizer step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def _step_(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        unbiased1, unbiased2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        ranks = self.world_size
        of_average = square / (unbiased2 * ranks)
        of_average.addcmul_(mean, mean, value=(1 - 1 / ranks) / unbiased1**2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = of_average.sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, denominator, value=-group["lr"] / unbiased1)


def check_adam(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Refuse what Adam cannot work with."""
    require(not isinstance(lr, bool) and lr >= 0, f"lr is {lr}; give a learning rate >= 0")
    require(all(0 <= beta < 1 for beta in betas), f"betas are {betas}; give two factors in [0, 1)")
    require(
        eps >= 0 and weight_decay >= 0,
        f"eps is {eps} and weight_decay {weight_decay}; give numbers >= 0",
    )
