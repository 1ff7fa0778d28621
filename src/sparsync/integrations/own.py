"""Save and load a rank's own weights and moments, by parameter name, where ranks differ in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.averaging.binding import saved_buffers
from sparsync.errors import ConfigurationError, require
from sparsync.units import local_of

__all__ = ["load_own", "own_state", "validate_own"]


def own_state(
    module: nn.Module, names: Collection[str], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return copies of this rank's parts of these parameters, of buffers, and of optimizers' states."""
    tensors = {name: local_of(t).clone() for name, t in _tensors(module, names).items()}
    moments = {
        name: {key: _copy(value) for key, value in one.state[parameter].items()}
        for one in optimizers
        for name, parameter in _named(module, one)
        if parameter in one.state
    }
    groups = [
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in one.param_groups
        ]
        for one in optimizers
    ]
    return {"parameters": tensors, "moments": moments, "groups": groups}


def validate_own(
    module: nn.Module,
    names: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
) -> None:
    """Refuse the state of other parameters or optimizers."""
    sizes = {name: tuple(local_of(t).shape) for name, t in _tensors(module, names).items()}
    own = state["parameters"]
    saved = sizes if own is None else {name: tuple(value.shape) for name, value in own.items()}
    wrong = next((n for n in {**sizes, **saved} if sizes.get(n) != saved.get(n)), None)
    require(
        wrong is None,
        f"the saved '{wrong}' has shape {saved.get(wrong or '')}, this rank's {sizes.get(wrong or '')}; "
        "load each rank's own state into the same set-up",
    )
    groups = [len(one.param_groups) for one in optimizers]
    require(
        [len(its) for its in state["groups"]] == groups,
        f"the saved optimizers have {[len(its) for its in state['groups']]} groups of parameters, "
        f"these {groups}; attach with the optimizers that the state was saved with",
    )


@torch.no_grad()
def load_own(
    module: nn.Module,
    names: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
) -> None:
    """Load what ``own_state`` returned; a resharded state has no weights, which the caller sets."""
    for name, tensor in _tensors(module, names).items() if state["parameters"] is not None else ():
        local_of(tensor).copy_(state["parameters"][name])
    for one, groups in zip(optimizers, state["groups"], strict=True):
        fresh = one.state_dict()
        fresh["state"] = {
            at: {key: _like(value, parameter) for key, value in state["moments"][name].items()}
            for at, (name, parameter) in enumerate(_named(module, one))
            if name in state["moments"]
        }
        for group, saved in zip(fresh["param_groups"], groups, strict=True):
            group.update(saved)
        try:
            one.load_state_dict(fresh)
        except (KeyError, ValueError) as error:
            raise ConfigurationError(f"the saved state of {type(one).__name__}: {error}") from error


def _tensors(module: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return these parameters, and the buffers that are saved."""
    found: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if n in names}
    return found | saved_buffers(module)


def _named(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield an optimizer's parameters in its order, with names."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for at, parameter in enumerate(every):
        yield names.get(parameter, f"({type(optimizer).__name__}, parameter {at})"), parameter


def _copy(value: Any) -> Any:
    return local_of(value).clone() if isinstance(value, Tensor) else value


def _like(value: Any, parameter: Tensor) -> Any:
    """Return a value as a shard of what the parameter is a shard of, if it is one."""
    if (
        not hasattr(parameter, "to_local")
        or getattr(value, "shape", None) != local_of(parameter).shape
    ):
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
