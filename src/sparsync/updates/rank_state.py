"""Save and load the weights and moments that differ between ranks, by parameter name."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from sparsync.averaging.binding import saved_buffers, states_of
from sparsync.errors import ConfigurationError
from sparsync.fields import Each, Either, Exactly, Fields, Kind, Number, Plain, Values, like
from sparsync.transports.agree import digest
from sparsync.units import is_finite, local_of

__all__ = [
    "SCALER_KIND",
    "is_broken",
    "load_optimizers",
    "load_weights",
    "own_kinds",
    "own_state",
    "same_moments",
]

Moments = Mapping[Tensor, Mapping[str, Any]]
"""The ``state`` of an optimizer."""

# Fields of torch's optimizer states that hold step counts, squares or magnitudes. A negative value there
# means damage, and its root would be NaN.
_NEVER_NEGATIVE: Final = (
    *("step", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "acc_delta", "sum"),
    *("variance", "row_var", "col_var", "step_size"),
)
# None means that there is no GradScaler, and {} that it is disabled.
SCALER_KIND: Final = Either(
    (
        Exactly(None),
        Fields({}),
        Fields(
            {
                "scale": Number(sys.float_info.min),
                "growth_factor": Number(1),
                "backoff_factor": Number(0, 1),
                "growth_interval": Number(1, whole=True),
                "_growth_tracker": Number(0, whole=True),
            }
        ),
    )
)
# Settings of parameter groups with special rules: switches, which may be None or a bool; rates, which are
# never negative; and numbers that torch's schedulers add.
_SWITCHES: Final = ("foreach", "fused", "capturable", "differentiable", "maximize")
_RATES: Final = ("lr", "eps", "weight_decay")
_SCHEDULERS: Final = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")


def own_state(
    module: nn.Module, trained: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return copies of this rank's parts of these parameters, of its buffers and optimizer states."""
    tensors = {name: local_of(t).clone() for name, t in _tensors(module, trained).items()}
    moments = {
        # A parameter that has had no gradient yet is saved as {}.  Every name is saved, so that a missing
        # name is noticed.
        name: {key: _copy(value) for key, value in one.state.get(parameter, {}).items()}
        for one in optimizers
        for name, parameter in _named(module, trained, one)
    }
    groups = [
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in one.param_groups
        ]
        for one in optimizers
    ]
    return {"parameters": tensors, "moments": moments, "groups": groups}


def is_broken(state: Mapping[str, Any], exchanged: Collection[str]) -> bool:
    """Return whether moments, or the exchanged part of the model, contain NaN or Inf."""
    weights = [state["parameters"][name] for name in exchanged]
    moments = [value for kept in state["moments"].values() for value in kept.values()]
    tensors = [one for one in (*weights, *moments) if isinstance(one, Tensor)]
    return not all(map(is_finite, tensors))


def own_kinds(
    module: nn.Module,
    trained: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    exchanged: Collection[str],
    resharded: bool,
    finite: bool,
) -> dict[str, Kind]:
    """Describe the result of ``own_state`` for this model and these optimizers.

    A ``resharded`` state has no weights.  Moments and the ``exchanged`` part of the model must be
    ``finite``, unless the state was saved with NaN that the next exchange would have repaired.
    """
    return {
        # None means that ranks start from the shared weights.  All ranks of a resharded state have None;
        # in any other state, it would reset only this rank.
        "parameters": Exactly(None)
        if resharded
        else _weights_kind(module, trained, exchanged if finite else ()),
        "moments": Fields(
            {
                name: _moments_kind(kept, finite)
                for one in optimizers
                for name, kept in _kept_after_a_step(module, trained, one).items()
            }
        ),
        "groups": Each(
            tuple(Each(tuple(_group_kind(one, g) for g in one.param_groups)) for one in optimizers)
        ),
    }


def _weights_kind(
    module: nn.Module, trained: Mapping[str, Tensor], finite: Collection[str]
) -> Kind:
    parts = {name: local_of(tensor) for name, tensor in _tensors(module, trained).items()}
    return Fields(
        {
            name: Values(tuple(part.shape), part.dtype, finite=name in finite)
            for name, part in parts.items()
        }
    )


def _kept_after_a_step(
    module: nn.Module, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Mapping[str, Any] | None]:
    """Return an optimizer's state for each parameter, now or after a first step; None if unknown."""
    kept = states_of(optimizer)
    return {name: kept.get(parameter) for name, parameter in _named(module, trained, optimizer)}


def _moments_kind(kept: Mapping[str, Any] | None, finite: bool) -> Kind:
    """Describe a parameter's moments: all of them, or none if it has had no gradient yet."""
    if kept is None:
        return Plain(named=True, finite=finite)
    every = {key: _moment_kind(key, value, finite) for key, value in kept.items()}
    return Either((Fields({}), Fields(every)))


def _moment_kind(key: str, value: Any, finite: bool) -> Kind:
    least = 0.0 if key in _NEVER_NEGATIVE and finite else -math.inf
    if not isinstance(value, Tensor):
        return like(value)
    part = local_of(value)
    # SGD's momentum is sparse if the gradients of an embedding are sparse
    return Values(tuple(part.shape), part.dtype, least, finite, sparse=key == "momentum_buffer")


def _group_kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Kind:
    """Describe a group's settings: all settings of the optimizer, and optionally a scheduler's numbers.

    Switches may be missing, because torch may have added them after the state was saved; they keep their
    live values.
    """
    kinds: dict[str, Kind] = dict.fromkeys(_SCHEDULERS, _number_kind(0.0))
    kinds |= {name: _setting_kind(name, its) for name, its in group.items() if name != "params"}
    # numbers are required, because they change the training; switches only change how it is computed
    numbers = {
        name
        for name, default in getattr(optimizer, "defaults", {}).items()
        if default is not None and not isinstance(default, bool)
    }
    required = {name: kinds.pop(name) for name in [*kinds] if name in numbers}
    # in optimizers of other libraries, groups may also contain e.g. step counts
    own = type(optimizer).__module__.startswith("torch.optim")
    return Fields(required, kinds, None if own else Plain(finite=False))


def _number_kind(least: float, value: Any = 0.0) -> Kind:
    """Describe a setting, e.g. the learning rate, which may be a number or a one-element tensor."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    tensors = [Values(shape, dtype, least) for dtype in (torch.float64, torch.float32)]
    # Inf counts as damage, unless the live setting is also Inf, e.g. to switch clipping off
    unbounded = [Exactly(value)] if isinstance(value, float) and math.isinf(value) else []
    return Either((*tensors, *unbounded, Number(least)))


def _setting_kind(name: str, value: Any) -> Kind:
    if name == "betas":  # in [0, 1): at 1 the bias correction would divide by 0
        beta = Either((Values((), torch.float32, 0.0), Number(0, math.nextafter(1.0, 0.0))))
        return Each((beta,) * len(value))
    least = 0.0 if name in _RATES else -math.inf
    if isinstance(value, bool) or name in _SWITCHES:
        return Either((Exactly(None), bool))
    if isinstance(value, int | float | Tensor):
        return _number_kind(least, value)
    return like(value)


@torch.no_grad()
def load_weights(
    module: nn.Module, trained: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Load the weights that ``own_state`` returned; a resharded state has none."""
    # copy in place, because optimizers and hooks hold these tensors
    if state["parameters"] is not None:
        for name, tensor in _tensors(module, trained).items():
            local_of(tensor).copy_(state["parameters"][name])


def load_optimizers(
    module: nn.Module,
    trained: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
) -> None:
    """Load the optimizer states that ``own_state`` returned."""
    for one, groups in zip(optimizers, state["groups"], strict=True):
        # the state is converted to torch's own form, with numbered parameters, and loaded by the
        # optimizer's ``load_state_dict``, so that its hooks and casts run
        fresh = one.state_dict()
        fresh["state"] = {
            at: {key: _like(value, parameter) for key, value in state["moments"][name].items()}
            for at, (name, parameter) in enumerate(_named(module, trained, one))
            if state["moments"][name]
        }
        fresh["param_groups"] = [
            {**group, **saved} for group, saved in zip(fresh["param_groups"], groups, strict=True)
        ]
        try:
            one.load_state_dict(fresh)
        except (KeyError, ValueError) as error:
            raise ConfigurationError(f"the saved state of {type(one).__name__}: {error}") from error


def same_moments(one: Moments, other: Moments) -> bool:
    """Return whether two states of an optimizer have the same bits.

    Cost: the cost of ``digest`` for every moment, unless both are the same object.
    """
    return one is other or _digests(one) == _digests(other)


def _digests(moments: Moments) -> dict[Tensor, dict[str, Any]]:
    def told(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        part = local_of(value)
        return digest(part.to_dense() if part.is_sparse else part)

    # leave out empty entries: a parameter without moments may have an empty entry or none at all
    return {
        p: {key: told(value) for key, value in kept.items()} for p, kept in moments.items() if kept
    }


def _tensors(module: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the trained parameters, by the names that they had at ``attach``, and saved buffers."""
    # pruning and parametrizations rename a parameter, e.g. to weight_orig
    now = dict(module.named_parameters())
    return {n: now.get(n, parameter) for n, parameter in trained.items()} | saved_buffers(module)


def _named(
    module: nn.Module, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """Yield an optimizer's parameters, in its order, with their names, as in ``_tensors``."""
    both = (*module.named_parameters(), *trained.items())
    names: dict[Tensor, str] = {parameter: name for name, parameter in both}
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for at, parameter in enumerate(every):
        yield names.get(parameter, f"({type(optimizer).__name__}, parameter {at})"), parameter


def _copy(value: Any) -> Any:
    return local_of(value).clone() if isinstance(value, Tensor) else value


def _like(value: Any, parameter: Tensor) -> Any:
    """Return a moment of a sharded parameter as a DTensor with the parameter's placements."""
    # a value whose shape differs, e.g. a step count, stays a plain tensor
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
