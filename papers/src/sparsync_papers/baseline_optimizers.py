"""Optimizers for comparison: Ok-Topk's Algorithm 2 verbatim, and variants of sparse Adam.

``attach`` sees gradients, so its residual consists of gradients and stays valid when the learning
rate changes. Here, ranks accumulate and exchange the *update* ``lr * gradient`` ("update space";
Ok-Topk, Algorithm 2). So each contribution to the residual is scaled by the learning rate of its step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from sparsync.algorithm import Algorithm, check_density
from sparsync.api import connect
from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.feedback.agreed_setup import agree_on_reducer, reducer_stats, weights_digest
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import (
    ParsedState,
    agree_state,
    parse_state,
    reducer_state,
    take_state,
)
from sparsync.feedback.schedule import Warmup
from sparsync.fields import Fields, opened, sealed
from sparsync.presets import resolve
from sparsync.transports.agree import on_all_or_none
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.units import Unit, check_same_parameters, output_parameters, plan_units

__all__ = ["LocalAdamW", "SecondMoment", "UpdateSpace", "UpdateSpaceAdamW", "UpdateSpaceSGD"]

SecondMoment = Literal["local", "frozen", "refreshed"]


@final
class LocalAdamW(torch.optim.AdamW):
    """AdamW on local gradients, with an estimate of the second moment of their average over P ranks.

    ::

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2         from this rank's gradients
        v' = m^2 + (v - m^2) / P                                averaging reduces the noise
        w = w - lr (m / (sqrt(v') + eps) + weight_decay w)      with m, v corrected for bias

    With the local second moment in place of the estimate v', steps would be up to sqrt(P) times
    shorter (``benchmarks/adam.md``).
    """

    def __init__(self, params: Iterable[Any], world_size: int, **options: Any) -> None:
        super().__init__(params, **options)
        self.noise = 1 / world_size

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do one optimizer step."""
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                gradient, state = parameter.grad, _state_of(self, parameter)
                state["step"] += 1
                mean, square = state["exp_avg"].lerp_(gradient, 1 - beta1), state["exp_avg_sq"]
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                unbiased1, unbiased2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                average = square * (self.noise / unbiased2)
                average.addcmul_(mean, mean, value=(1 - self.noise) / unbiased1**2)
                parameter.mul_(1 - lr * group["weight_decay"])
                root = average.sqrt_().add_(group["eps"])
                parameter.addcdiv_(mean, root, value=-lr / unbiased1)


def _state_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        state["step"] = 0
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
    return state


class UpdateSpace(torch.optim.Optimizer):
    """An optimizer that accumulates, exchanges and subtracts updates; see ``UpdateSpaceSGD``."""

    def __init__(
        self,
        model: nn.Module,
        defaults: dict[str, Any],
        algorithm: str | Algorithm,
        *,
        density: float = 0.01,
        comm: Communicator | None = None,
        unit_bytes: int | None = None,
        compress: Callable[[str, Tensor], bool] | None = None,
        warmup: Warmup = Warmup(),  # noqa: B008 (frozen)
        agreed: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigurationError(
                f"{name} needs local gradients but the model is wrapped in DDP, which averages "
                "them; give it the plain module, or use sparsync.attach with any optimizer"
            )
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        super().__init__([p for _, p in named], defaults)
        self._model, self._parameters = model, dict(named)
        chosen = resolve(algorithm, **options)
        unit_bytes = chosen.unit_bytes if unit_bytes is None else unit_bytes
        output = output_parameters(model) if chosen.output else ()
        comm = comm or connect()
        self.reducer = Reducer(
            comm,
            plan_units(named, unit_bytes, compress or chosen.compress, output),
            run(chosen.on(comm)),
            check_density(density),
            warmup,
        )
        agree_on_reducer(
            self.reducer,
            unit_bytes=unit_bytes,
            optimizer=name,
            initial_weights=weights_digest(self._parameters.values()),
            **(agreed or {}),
        )

    @abstractmethod
    def _update_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        """Write a parameter's update, i.e. the amount to subtract, into the 1-D tensor ``update``."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new parameters once the ranks have agreed on the units."""
        if hasattr(self, "reducer"):
            raise ConfigurationError(
                f"{type(self).__name__} exchanges the parameters that it was built with; "
                "build it after the model is complete"
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a GradScaler, which reads this attribute: it could skip a step on only some ranks."""
        raise ConfigurationError(
            f"{type(self).__name__} does not support a GradScaler: a rank that skipped its step "
            "would leave the others waiting; use bfloat16 autocast, which needs none, or "
            "sparsync.attach"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchange one update, wait for the result, and apply it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_same_parameters(self._model, self._parameters)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        updates = [self._updates(unit, groups) for unit in self.reducer.units]
        try:
            run(self.reducer.reduce(updates))  # replaces the updates with the result
        except NonFiniteGradientError:
            self.reducer.skip()
            raise
        except BaseException:
            self.reducer.refuse()
            raise
        for unit, flat in zip(self.reducer.units, updates, strict=True):
            for slot in unit.slots:
                parameter = self._parameters[slot.name]
                update = flat[slot.start : slot.start + slot.size]
                self._apply_(parameter, groups[parameter], update.view(parameter.shape))
        return loss

    def _apply_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        """Subtract the exchanged update, which is the same on all ranks."""
        parameter.sub_(update)

    def _updates(self, unit: Unit, groups: Mapping[Tensor, dict[str, Any]]) -> Tensor:
        wide = torch.promote_types(unit.dtype, torch.float32)  # like the residual
        flat = torch.zeros(unit.size, dtype=wide, device=unit.device)
        for slot in unit.slots:
            parameter = self._parameters[slot.name]
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ConfigurationError(
                    f"the gradient of '{slot.name}' is sparse; build its embedding with sparse=False"
                )
            if parameter.grad is not None:
                piece = flat[slot.start : slot.start + slot.size]
                self._update_(parameter, groups[parameter], piece)
        return flat

    def stats(self) -> dict[str, Any]:
        """Return the number of steps, the bytes per step and phase, and the residual norms."""
        return reducer_stats(self.reducer)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state and the state of this rank's reducer in one dictionary, the envelope."""
        return sealed("optimizer", {**super().state_dict(), "reducer": reducer_state(self.reducer)})

    def validate(self, state: Mapping[str, Any]) -> ParsedState:
        """Check, without communication, that a saved state fits; leave the optimizer unchanged."""
        content = Fields({"state": Mapping, "param_groups": list, "reducer": object})
        return parse_state(self.reducer, opened(state, "optimizer", content)["reducer"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore this rank's ``state_dict``, bit for bit; all ranks call it."""
        comm = self.reducer.comm
        parsed = run(
            on_all_or_none([comm], lambda: self.validate(state_dict), "load its saved state")
        )
        run(agree_state(comm, parsed))
        take_state(self.reducer, parsed)
        content = state_dict["content"]
        super().load_state_dict({k: v for k, v in content.items() if k != "reducer"})


@final
class UpdateSpaceSGD(UpdateSpace):
    """SGD that exchanges its updates sparsely (Ok-Topk, Algorithm 2).  The model is not wrapped.

    ::

        acc = residual + lr * gradient            line 4
        u, indexes = sparse_allreduce(acc)        line 5
        residual = acc outside indexes            line 6
        w = w - u / P                             line 7

    The model must be equal on all ranks; schedulers may change ``lr`` between steps.  The
    ``options`` density (k / n), comm, unit_bytes and compress mean the same as in
    ``sparsync.attach``; all others are options of the preset.

    Raises:
        ConfigurationError: the module is wrapped in DDP, lr < 0, the density is out of range, or an
            algorithm or option is unknown.
        NonFiniteGradientError: from ``step``; parameters and residuals are unchanged.

    State: the reducer's state and torch's state, per rank, in ``state_dict()``.
    Differs from the paper: accepts any preset. "sparcml" gives SparCML's Algorithm 1 verbatim,
    which applies the sum instead of the mean.

    Example:
        >>> model = nn.Linear(2, 1, bias=False); _ = nn.init.ones_(model.weight)
        >>> optimizer = UpdateSpaceSGD(model, lr=0.5, density=0.5)
        >>> model(torch.tensor([[1.0, 4.0]])).sum().backward(); optimizer.step()
        >>> model.weight.tolist()
        [[1.0, -1.0]]
    """

    def __init__(
        self, model: nn.Module, lr: float, algorithm: str | Algorithm = "oktopk", **options: Any
    ) -> None:
        torch.optim.SGD(model.parameters(), lr)  # checks ``lr``
        super().__init__(model, {"lr": lr}, algorithm, **options)

    def _update_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        assert parameter.grad is not None
        torch.mul(parameter.grad.reshape(-1), group["lr"], out=update)


@final
class UpdateSpaceAdamW(UpdateSpace):
    """AdamW that exchanges its updates sparsely; moments are local.  The model is not wrapped.

    ::

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2       local
        acc = residual + lr m / (sqrt(v) + eps)               with m, v corrected for bias
        w = (1 - lr weight_decay) w - mean of the delivered entries

    Args:
        model: see ``UpdateSpaceSGD``; the same holds for ``lr``, ``algorithm`` and ``options``.
        betas: b1 and b2.
        eps: number added to the square root.
        weight_decay: decoupled, applied equally on all ranks.
        second_moment: "local"; "frozen": averaged over ranks after the warm-up and then kept, as
            in 1-bit Adam (an element whose moment is 0 gets its tensor's mean); or "refreshed":
            averaged after the warm-up and every ``refresh_period`` steps, and local in between.
        refresh_period: steps between averages; each average is a dense allreduce of n elements.
        warmup_steps: number of steps at the start whose updates are exchanged dense.

    Raises:
        ConfigurationError: an argument is invalid, or "frozen" has no warm-up.
        NonFiniteGradientError: from ``step``; parameters and residuals are unchanged, as are the
            moments of parameters whose local gradient was not finite.

    State: torch's state (local moments) and the reducer's state.

    Differs from the paper: with Adam, Ok-Topk exchanges gradients.

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
        **options: Any,
    ) -> None:
        torch.optim.AdamW(model.parameters(), lr, betas, eps, weight_decay)  # checks them
        if second_moment == "frozen" and not warmup_steps:
            raise ConfigurationError(
                "a frozen second moment needs warmup_steps > 0, in which it is learned"
            )
        self.second_moment, self.refresh_period = second_moment, refresh_period
        super().__init__(
            model,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            algorithm,
            warmup=Warmup(warmup_steps),
            agreed={"second_moment": second_moment, "refresh_period": refresh_period},
            **options,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Exchange and apply one update; average the second moment when this is due."""
        loss = super().step(closure)
        warmup = self.reducer.plan.warmup
        since = self.reducer.step - (warmup.steps if warmup else 0)
        wanted = 0 if since < 0 else 1
        if since >= 0 and self.second_moment == "refreshed":
            wanted += since // self.refresh_period
        counted = self.param_groups[0]  # saved with the state
        if self.second_moment != "local" and counted.get("averages", 0) < wanted:
            counted["averages"] = wanted
            self._average_second_moments()
        return loss

    def _average_second_moments(self) -> None:
        """Average second moments over ranks, one parameter at a time, in the same order on all ranks."""
        comm, frozen = self.reducer.comm, self.second_moment == "frozen"
        beta2 = self.param_groups[0]["betas"][1]
        for unit in self.reducer.units:
            for slot in unit.slots:
                parameter = self._parameters[slot.name]
                state = _state_of(self, parameter)
                square = state["exp_avg_sq"]
                if frozen and state["step"]:
                    square = square / (1 - beta2 ** state["step"])
                flat = run(comm.allreduce(square.reshape(-1), "second moment")) / comm.world_size
                # without a floor, elements that never had a gradient would take giant steps
                if frozen:
                    floor = flat.mean() if bool(flat.any()) else torch.ones(())
                    flat = torch.where(flat > 0, flat, floor)
                state["exp_avg_sq"].copy_(flat.view(square.shape))

    def _update_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        # all ranks will refuse this step, so its gradient must not change the moments
        if not bool(torch.isfinite(gradient).all()):
            update.fill_(torch.nan)
            return
        state = _state_of(self, parameter)
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
