"""Update space: Ok-Topk SGD to the letter, with the learning rate inside the residual.

A DDP hook sees gradients, so its residual is in gradient space and keeps its meaning when the
learning rate changes.  Here what accumulates is the *update* ``lr * gradient`` (Ok-Topk,
Algorithm 2): mass that waits in the residual was scaled by the learning rate of its own step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.api import connect
from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.integrations.base import (
    agree_on_reducer,
    load_reducer_state,
    reducer_state,
    reducer_stats,
)
from sparsync.presets import Algorithm, check_density, resolve
from sparsync.reducer import Reducer
from sparsync.transports.base import Communicator, run
from sparsync.units import plan_units

__all__ = ["UpdateSpaceSGD"]


class UpdateSpaceSGD(torch.optim.Optimizer):
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
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigurationError(
                "UpdateSpaceSGD needs local gradients but the model is wrapped in DDP, which averages "
                "them; give it the plain module, or use sparsync.attach with any optimizer"
            )
        if not lr >= 0:
            raise ConfigurationError(f"lr is {lr}; give a learning rate >= 0")
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        super().__init__([p for _, p in named], {"lr": lr})
        self._parameters = dict(named)
        chosen = resolve(algorithm, **options)
        unit_bytes = chosen.unit_bytes if unit_bytes is None else unit_bytes
        self.reducer = Reducer(
            comm or connect(),
            plan_units(named, unit_bytes, compress),
            chosen,
            check_density(density),
        )
        agree_on_reducer(self.reducer, unit_bytes=unit_bytes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that would come after the units were agreed on."""
        if hasattr(self, "reducer"):
            raise ConfigurationError(
                "UpdateSpaceSGD exchanges the parameters that it was built with; "
                "build it after the model is complete"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one exchanged update; blocks until it is there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        updates = []
        for unit in self.reducer.units:
            wide = torch.promote_types(unit.dtype, torch.float32)  # as the residual
            flat = torch.zeros(unit.size, dtype=wide, device=unit.device)
            for slot in unit.slots:
                parameter = self._parameters[slot.name]
                if parameter.grad is not None:
                    piece = flat[slot.start : slot.start + slot.size]
                    torch.mul(parameter.grad.reshape(-1), rates[parameter], out=piece)
            updates.append(flat)
        try:
            run(self.reducer.reduce(updates))  # in place
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
                parameter.sub_(update.view(parameter.shape))
        return loss

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: steps, bytes per step and phase, residual norms."""
        return reducer_stats(self.reducer)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state and, under "sparsync", this rank's reducer state."""
        return {**super().state_dict(), "sparsync": reducer_state(self.reducer)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where this rank's ``state_dict`` was taken, bit for bit."""
        rest = dict(state_dict)
        if "sparsync" not in rest:
            raise ConfigurationError(
                "the saved state has no 'sparsync' part; load what this optimizer's state_dict() "
                "returned"
            )
        load_reducer_state(self.reducer, rest.pop("sparsync"))
        super().load_state_dict(rest)
