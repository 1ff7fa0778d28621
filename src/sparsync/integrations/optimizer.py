"""Update space: Ok-Topk SGD to the letter, with the learning rate inside the residual.

A DDP hook sees gradients, so its residual is in gradient space and keeps its meaning when the
learning rate changes.  Here what accumulates is the *update* ``lr * gradient`` (Ok-Topk,
Algorithm 2): mass that waits in the residual was scaled by the learning rate of its own step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync.integrations.adam import check_adam
from sparsync.integrations.update_space import UpdateSpace
from sparsync.presets import Algorithm
from sparsync.transports.base import Communicator, run
from sparsync.warmup import Warmup

__all__ = ["SecondMoment", "UpdateSpaceAdamW", "UpdateSpaceSGD"]

SecondMoment = Literal["local", "frozen", "refreshed"]


@final
class UpdateSpaceSGD(UpdateSpace):
    """SGD whose updates are exchanged sparsely (Ok-Topk, Algorithm 2).  The model is not wrapped.

    ::

        acc = residual + lr * gradient            line 4
        u, indexes = sparse_allreduce(acc)        line 5
        residual = acc outside indexes            line 6
        w = w - u / P                             line 7

    Args:
        model: a plain module, equal on all ranks (not DDP: gradients must be local).
        lr: learning rate; schedulers may change it between steps.
        algorithm: a preset's name or an ``Algorithm``.
        density: fraction k / n that is exchanged.
        comm: default ``sparsync.connect()``.
        unit_bytes: what is selected together, as in ``sparsync.attach``.
        compress: which parameters are exchanged sparsely, as in ``sparsync.attach``.
        options: of the preset.

    Raises:
        ConfigurationError: lr < 0, a bad density, an unknown algorithm or option.
        NonFiniteGradientError: from ``step``; parameters and residuals are as before.

    State: the reducer's, under "sparsync" in ``state_dict()``: one per rank.
    Differs from the paper: any preset, not only Ok-Topk; "sparcml" here is SparCML's Algorithm 1 to
    the letter, which applies the sum instead of the mean.

    Example:
        >>> model = nn.Linear(2, 1, bias=False); _ = nn.init.ones_(model.weight)
        >>> optimizer = UpdateSpaceSGD(model, lr=0.5, density=0.5)
        >>> model(torch.tensor([[1.0, 4.0]])).sum().backward(); optimizer.step()
        >>> model.weight.tolist()
        [[1.0, -1.0]]
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        algorithm: str | Algorithm = "oktopk",
        *,
        density: float = 0.01,
        comm: Communicator | None = None,
        unit_bytes: int | None = None,
        compress: Callable[[str, Tensor], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model,
            {"lr": lr},
            algorithm,
            density=density,
            comm=comm,
            unit_bytes=unit_bytes,
            compress=compress,
            warmup=Warmup(),
            **options,
        )

    def _update_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        assert parameter.grad is not None
        torch.mul(parameter.grad.reshape(-1), group["lr"], out=update)


@final
class UpdateSpaceAdamW(UpdateSpace):
    """AdamW whose updates are exchanged sparsely; moments are local.  The model is not wrapped.

    ::

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2       local
        acc = residual + lr m / (sqrt(v) + eps)               with m, v corrected for bias
        w = (1 - lr weight_decay) w - mean of what is delivered

    Args:
        model: a plain module, equal on all ranks (not DDP: gradients must be local).
        lr: learning rate; schedulers may change it between steps.
        algorithm: a preset's name or an ``Algorithm``.
        betas: b1 and b2.
        eps: added to the root.
        weight_decay: decoupled, applied by all ranks alike.
        second_moment: "local"; "frozen": averaged over ranks after the warm-up and kept (1-bit Adam's
            idea; an element without any gets its tensor's mean); "refreshed": averaged then and
            every ``refresh_period`` steps, local in between.
        refresh_period: steps; an average is a dense allreduce of n elements.
        warmup_steps: the first steps are exchanged dense.
        density: as for ``UpdateSpaceSGD``, and so are comm, unit_bytes, compress and options.
        comm: see there.
        unit_bytes: see there.
        compress: see there.
        options: of the preset.

    Raises:
        ConfigurationError: bad arguments; "frozen" without a warm-up.
        NonFiniteGradientError: from ``step``; parameters and residuals are as before, and so are the
            moments of a parameter whose local gradient was not finite.

    State: torch's (local moments), and the reducer's.   Differs from the paper: Ok-Topk exchanges
    gradients under Adam.  ``LocalUpdates`` is what keeps up with dense training (``benchmarks/adam.md``).

    Example:
        >>> model = nn.Linear(2, 1, bias=False); _ = nn.init.ones_(model.weight)
        >>> optimizer = UpdateSpaceAdamW(model, lr=0.5, density=0.5, weight_decay=0.0)
        >>> model(torch.tensor([[1.0, 4.0]])).sum().backward(); optimizer.step()
        >>> model.weight.tolist()
        [[0.5, 1.0]]

    References: Tang et al., 1-bit Adam, ICML 2021.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        algorithm: str | Algorithm = "oktopk",
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        second_moment: SecondMoment = "local",
        refresh_period: int = 100,
        warmup_steps: int = 0,
        density: float = 0.01,
        comm: Communicator | None = None,
        unit_bytes: int | None = None,
        compress: Callable[[str, Tensor], bool] | None = None,
        **options: Any,
    ) -> None:
        check_adam(lr, betas, eps, weight_decay)
        if second_moment not in ("local", "frozen", "refreshed"):
            raise ConfigurationError(
                f"second_moment is {second_moment!r}; choose local, frozen or refreshed"
            )
        if second_moment == "frozen" and not warmup_steps:
            raise ConfigurationError(
                "a frozen second moment needs warmup_steps > 0, in which it is learned"
            )
        if refresh_period < 1:
            raise ConfigurationError(f"refresh_period is {refresh_period}; give at least 1 step")
        self.second_moment, self.refresh_period = second_moment, refresh_period
        super().__init__(
            model,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            algorithm,
            density=density,
            comm=comm,
            unit_bytes=unit_bytes,
            compress=compress,
            warmup=Warmup(warmup_steps),
            agreed={"second_moment": second_moment, "refresh_period": refresh_period},
            **options,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one exchanged update; average the second moment when that is due."""
        loss = super().step(closure)
        since = self.reducer.step - self.reducer.warmup.steps
        wanted = 0 if since < 0 else 1
        if since >= 0 and self.second_moment == "refreshed":
            wanted += since // self.refresh_period
        counted = self.param_groups[0]  # saved with the state
        if self.second_moment != "local" and counted.get("averages", 0) < wanted:
            counted["averages"] = wanted
            self._average_second_moments()
        return loss

    def _average_second_moments(self) -> None:
        """Average over ranks, parameter by parameter in one order on all of them."""
        comm, frozen = self.reducer.comm, self.second_moment == "frozen"
        beta2 = self.param_groups[0]["betas"][1]
        for unit in self.reducer.units:
            for slot in unit.slots:
                parameter = self._parameters[slot.name]
                state = self._state_of(parameter)
                square = state["exp_avg_sq"]
                if frozen and state["step"]:
                    square = square / (1 - beta2 ** state["step"])
                flat = run(comm.allreduce(square.reshape(-1), "second moment")) / comm.world_size
                if frozen:  # without a floor, what was never seen would make giant steps
                    floor = flat.mean() if bool(flat.any()) else torch.ones(())
                    flat = torch.where(flat > 0, flat, floor)
                state["exp_avg_sq"].copy_(flat.view(square.shape))

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
        return state

    def _update_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if not bool(torch.isfinite(gradient).all()):  # all ranks will refuse: keep the moments
            update.fill_(torch.nan)
            return
        state = self._state_of(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"].lerp_(gradient, 1 - beta1), state["exp_avg_sq"]
        unbiased = 1.0
        if self.second_moment != "frozen" or not self.param_groups[0].get("averages", 0):
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            unbiased = 1 - beta2 ** state["step"]
        root = (square / unbiased).sqrt_().add_(group["eps"])
        rate = group["lr"] / (1 - beta1 ** state["step"])
        torch.mul((mean / root).reshape(-1), rate, out=update)

    def _apply_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update)
