"""Update space: what is accumulated and exchanged are an optimizer's updates, not gradients.

Mass that waits in the residual was scaled by the learning rate of its own step (Ok-Topk, Algorithm 2).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.api import connect
from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.integrations.base import (
    agree_on_reducer,
    reducer_stats,
    weights_digest,
)
from sparsync.integrations.checks import check_same_parameters, output_parameters
from sparsync.presets import Algorithm, check_density, resolve
from sparsync.reducer import Reducer
from sparsync.reducer_state import reducer_state, restore_reducer
from sparsync.transports.base import Communicator, run
from sparsync.units import Unit, plan_units
from sparsync.warmup import Warmup

__all__ = ["UpdateSpace"]


class UpdateSpace(torch.optim.Optimizer):
    """An optimizer whose updates are accumulated, exchanged and subtracted.

    Args:
        model: a plain module (not DDP).
        defaults: of the parameter group, "lr" among them.
        algorithm: see the subclasses, and so are the others.
        density: see there.
        comm: see there.
        unit_bytes: see there.
        compress: see there.
        warmup: the first steps.
        agreed: more settings that must be equal on all ranks.
        options: of the preset.
    """

    def __init__(
        self,
        model: nn.Module,
        defaults: dict[str, Any],
        algorithm: str | Algorithm,
        *,
        density: float,
        comm: Communicator | None,
        unit_bytes: int | None,
        compress: Callable[[str, Tensor], bool] | None,
        warmup: Warmup,
        agreed: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        name = type(self).__name__
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ConfigurationError(
                f"{name} needs local gradients but the model is wrapped in DDP, which averages "
                "them; give it the plain module, or use sparsync.attach with any optimizer"
            )
        if not defaults["lr"] >= 0:
            raise ConfigurationError(f"lr is {defaults['lr']}; give a learning rate >= 0")
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
            initial_weights=weights_digest(self._parameters),
            **(agreed or {}),
        )

    @abstractmethod
    def _update_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        """Write what is to be subtracted from a parameter that has a gradient; ``update`` is 1-D."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters that would come after the units were agreed on."""
        if hasattr(self, "reducer"):
            raise ConfigurationError(
                f"{type(self).__name__} exchanges the parameters that it was built with; "
                "build it after the model is complete"
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refuse a GradScaler, which asks for this: an overflow would skip the step on one rank alone."""
        raise ConfigurationError(
            f"{type(self).__name__} takes no GradScaler: a rank that skips its step would leave the "
            "others waiting; use bfloat16 autocast, which needs none, or sparsync.attach"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply one exchanged update; blocks until it is there."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_same_parameters(self._model, self._parameters.values())
        groups = {p: group for group in self.param_groups for p in group["params"]}
        updates = [self._updates(unit, groups) for unit in self.reducer.units]
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
                self._apply_(parameter, groups[parameter], update.view(parameter.shape))
        return loss

    def _apply_(self, parameter: Tensor, group: dict[str, Any], update: Tensor) -> None:
        """Subtract the exchanged update: alike on all ranks."""
        parameter.sub_(update)

    def _updates(self, unit: Unit, groups: Mapping[Tensor, dict[str, Any]]) -> Tensor:
        wide = torch.promote_types(unit.dtype, torch.float32)  # as the residual
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
        run(restore_reducer(self.reducer, rest.pop("sparsync")))
        super().load_state_dict(rest)
