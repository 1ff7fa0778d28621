"""Which optimizers ``attach`` takes: wrappers are seen through, others are refused in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsync.errors import ConfigurationError
from sparsync.updates.lengths import of_own_length
from sparsync.updates.moments import corrects

__all__ = ["chain_of", "check_stepped", "held_by", "holds", "plain_optimizers", "treatment_of"]

_ALIKE: Final = "exchange='gradients', which all ranks then have alike, suits it"


def plain_optimizers(given: Any) -> list[Optimizer]:
    """Return the optimizers that step, without the wrappers of Accelerate, SAM and the like.

    A wrapper is what holds another optimizer, in whatever attribute.  Loops call it or the inner one
    (SAM's ``second_step``), but the inner one steps in either case, and once: its hooks count.

    Raises:
        ConfigurationError: none is a ``torch.optim.Optimizer``, one averages weights by itself, or was
            not initialised as one.
    """
    found: dict[Optimizer, None] = {}
    for one, inner in chain_of(given):
        name = type(one).__name__
        if callable(getattr(getattr(one, "averager", None), "average_parameters", None)):
            raise ConfigurationError(
                f"{name} averages weights over ranks, as attach does; give the optimizer inside it, to "
                "attach and to the loop"
            )
        if inner:
            continue
        if not isinstance(one, Optimizer):
            raise ConfigurationError(
                f"optimizer is {name}; give a torch.optim.Optimizer, or a list of them"
            )
        if not hasattr(one, "_optimizer_step_post_hooks"):
            raise ConfigurationError(
                f"{name} has no hooks, because its __init__ does not call torch.optim.Optimizer's; let "
                "it call super().__init__(params, defaults)"
            )
        found[one] = None
    return list(found)


def _held(one: Any) -> list[Optimizer]:
    """Return the optimizers in an object's attributes, or in lists and dictionaries there."""
    values: list[Any] = []
    # a property may be all that a wrapper shows (Lightning's)
    for value in (*getattr(one, "__dict__", {}).values(), getattr(one, "optimizer", None)):
        if isinstance(value, list | tuple):
            values += value
        elif type(value) is dict:
            values += value.values()
        else:
            values.append(value)
    found = {id(value): value for value in values if isinstance(value, Optimizer)}
    return [value for value in found.values() if value is not one]


def chain_of(given: Any, around: Sequence[Any] = ()) -> Iterator[tuple[Any, list[Optimizer]]]:
    """Yield what was given, with the optimizers inside it, and these in turn.

    An optimizer may know what it is ``around``, as a wrapper's inner one its owner.
    """
    for one in () if given is None else given if isinstance(given, Sequence) else (given,):
        inner = [held for held in _held(one) if all(held is not other for other in around)]
        yield one, inner
        yield from chain_of(inner, (*around, one))


def holds(given: Any, optimizers: Sequence[Optimizer]) -> bool:
    """Tell whether any of these optimizers is inside one that was given, as inside a wrapper."""
    inside = (held for _, inner in chain_of(given) for held in inner)
    return any(held is one for held in inside for one in optimizers)


def check_stepped(given: Any) -> None:
    """Refuse an optimizer whose steps on one rank alone cannot be averaged.

    Raises:
        ConfigurationError: it leaves parameters to other ranks' optimizers (ZeRO), makes the weights to
            evaluate from memory of its own (schedule-free), or searches along gradients of several
            places (LBFGS).
    """
    for one, inner in chain_of(given):
        name = type(one).__name__
        wanted, held = (set(map(id, _parameters(its))) for its in ([one], inner))
        if held and not wanted <= held:
            raise ConfigurationError(
                f"{name} steps {len(wanted & held)} of {len(wanted)} parameters on this rank, and takes "
                "the others from other ranks, as ZeroRedundancyOptimizer does: averaged, every parameter "
                f"would learn from one rank's data alone.  Give each rank a whole optimizer; {_ALIKE}"
            )
        switches = (getattr(one, "train", None), getattr(one, "eval", None))
        if not inner and all(
            map(callable, switches)
        ):  # wrappers pass these calls on (Accelerate's)
            raise ConfigurationError(
                f"{name} has train() and eval(), as schedule-free optimizers: the weights to evaluate "
                "come from memory of each rank, which updates do not average, so that replicas would "
                f"differ.  Take a schedule and AdamW; {_ALIKE}"
            )
        if isinstance(one, torch.optim.LBFGS):
            raise ConfigurationError(
                f"{name} compares gradients at the places of its last steps, which averages move; take "
                f"another optimizer; {_ALIKE}"
            )


def _parameters(several: Sequence[Any]) -> list[Tensor]:
    groups = [group for one in several for group in getattr(one, "param_groups", ())]
    return [parameter for group in groups for parameter in group["params"]]


def held_by(optimizers: Sequence[Optimizer], trained: Mapping[str, Tensor]) -> str:
    """Return which trained parameters the optimizers step: ranks compare it.

    Example:
        >>> net = torch.nn.Linear(2, 2)
        >>> held_by([torch.optim.SGD([net.weight])], dict(net.named_parameters()))
        '1 of 2 parameters (5d6974eb)'
    """
    steps = set(map(id, _parameters(optimizers)))
    names = [name for name, parameter in trained.items() if id(parameter) in steps]
    return f"{len(names)} of {len(trained)} parameters ({crc32(repr(names).encode()):08x})"


def treatment_of(optimizers: Sequence[Optimizer], *, noise_correction: bool) -> str:
    """Return what is done with these optimizers' updates, in words.

    Example:
        >>> treatment_of([torch.optim.Adagrad([torch.zeros(1)])], noise_correction=True)
        "Adagrad's steps are lengthened by what averaging shortens them"
    """
    corrected = "are corrected for the noise of a single rank's gradients"
    lengthened = "are lengthened by what averaging shortens them"
    kinds: dict[str, list[str]] = {corrected: [], lengthened: [], "are averaged as they are": []}
    for one in optimizers:
        measured = (corrects(one), any(True for _ in of_own_length(one)))
        known = (*(noise_correction and each for each in measured), True)
        kind = next(kind for kind, does in zip(kinds, known, strict=True) if does)
        if (name := f"{type(one).__name__}'s") not in (names := kinds[kind]):
            names.append(name)
    there = [(kind, " and ".join(names)) for kind, names in kinds.items() if names]
    return ", ".join(
        f"{names}{'' if at else ' steps'} {kind}" for at, (kind, names) in enumerate(there)
    )
