"""Check the optimizers given to ``attach``: unwrap wrappers, and refuse unsuitable optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync.errors import ConfigurationError
from sparsync.updates.gradient_noise import corrects
from sparsync.updates.step_length import of_own_length

__all__ = [
    "chain_of",
    "check_stepped",
    "check_stepped_here",
    "check_steps_some",
    "held_by",
    "holds",
    "plain_optimizers",
    "treatment_of",
]

_ALIKE: Final = "exchange='gradients' suits it, because all ranks then make the same steps"

# These optimizers of the package pytorch-optimizer compute the weights from sums, or from older weights,
# that each rank keeps to itself.  So their steps undo exchanges: three steps after an exchange, only 0 to
# 73 % of its change was left.  The optimizers are listed by name, because their states do not reveal this
# behaviour (Prodigy also keeps its first weights).
_FROM_MEMORY: Final = frozenset(
    {"A2Grad", "DAdaptAdaGrad", "DAdaptSGD", "FTRL", "MADGRAD", "Ranger", "SRMM"}
)


def plain_optimizers(given: Any) -> list[Optimizer]:
    """Return the optimizers that change the weights, without wrappers such as SAM.

    A wrapper is any object that holds an optimizer in one of its attributes.  Training loops call the
    wrapper or the inner optimizer (SAM's ``second_step``).  In both cases the inner optimizer steps
    exactly once, so ``attach`` hooks the inner one.

    Raises:
        ConfigurationError: an object is not a ``torch.optim.Optimizer``, averages weights itself, or
            never called the constructor of ``Optimizer``.
    """
    # a dict serves as an ordered set; the order matters, because the last optimizer ends an iteration
    found: dict[Optimizer, None] = {}
    for one, inner in chain_of(given):
        name = type(one).__name__
        # e.g. torch's PostLocalSGDOptimizer
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
        # torch's Optimizer.__init__ creates the hook registries; without them, attach cannot add hooks
        if not hasattr(one, "_optimizer_step_post_hooks"):
            raise ConfigurationError(
                f"{name} has no hooks, because its __init__ does not call torch.optim.Optimizer's; let "
                "it call super().__init__(params, defaults)"
            )
        found[one] = None
    return list(found)


def _held(one: Any) -> list[Optimizer]:
    """Return the optimizers that an object holds in attributes, directly or in lists and dictionaries."""
    values: list[Any] = []
    # Lightning's wrapper exposes its optimizer only through a property, which ``__dict__`` does not list
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
    """Yield each given optimizer with a list of the optimizers inside it, then recurse into that list.

    ``around`` lists the wrappers on the path so far.  They are skipped, because an inner optimizer that
    refers back to its wrapper would make the recursion endless.
    """
    for one in () if given is None else given if isinstance(given, Sequence) else (given,):
        inner = [held for held in _held(one) if all(held is not other for other in around)]
        yield one, inner
        yield from chain_of(inner, (*around, one))


def holds(given: Any, optimizers: Sequence[Optimizer]) -> bool:
    """Return whether a given optimizer wraps one of these optimizers."""
    inside = (held for _, inner in chain_of(given) for held in inner)
    return any(held is one for held in inside for one in optimizers)


def check_stepped(given: Any) -> None:
    """Refuse an optimizer whose local steps cannot be averaged.

    Raises:
        ConfigurationError: the optimizer leaves some parameters to other ranks (ZeRO); computes weights,
            for training (FTRL) or for evaluation (schedule-free), from state that is not averaged; or
            compares gradients at several points (LBFGS).
    """
    for one, inner in chain_of(given):
        name = type(one).__name__
        # Such optimizers are recognised by their behaviour where possible, because packages have them
        # under many names. ZeRO lists all parameters, but its inner optimizer holds only this rank's
        # share.
        wanted, held = (set(map(id, _parameters(its))) for its in ([one], inner))
        if held and not wanted <= held:
            raise _shared_out(name, len(wanted & held), len(wanted), "ZeroRedundancyOptimizer does")
        switches = (getattr(one, "train", None), getattr(one, "eval", None))
        # wrappers such as Accelerate's also have train() and eval(), which only forward the call
        if not inner and all(map(callable, switches)):
            raise ConfigurationError(
                f"{name} has train() and eval(), as schedule-free optimizers do: the weights for "
                "evaluation come from state of each rank that is not averaged, so replicas would "
                f"differ.  Use AdamW with a learning-rate schedule; {_ALIKE}"
            )
        if any(base.__name__ in _FROM_MEMORY for base in type(one).__mro__):
            raise ConfigurationError(
                f"{name} computes the weights from sums or older weights in its own memory, so its next "
                f"steps would undo what ranks exchange; take another optimizer; {_ALIKE}"
            )
        if isinstance(one, torch.optim.LBFGS):
            raise ConfigurationError(
                f"{name} compares gradients at the points where its last steps ended, and averages move "
                f"the weights away from them; take another optimizer; {_ALIKE}"
            )


def check_stepped_here(optimizer: Optimizer, trained: Collection[Tensor]) -> None:
    """Refuse an optimizer that has called collectives in its step, and stepped only its rank's share.

    Single-file Muons do so: every rank steps some of the parameters, keeps moments only for these, and
    gathers the others.  Only a step reveals this, because every rank holds all parameters.

    Args:
        optimizer: an optimizer that has just taken its first step, and called collectives in it.
        trained: the parameters whose updates are exchanged.

    Raises:
        ConfigurationError: some of the parameters that have gradients have no moments.

    Example:
        >>> class Muon(torch.optim.SGD): pass  # not one of torch's own, which never communicate
        >>> weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
        >>> for one in weights: one.grad = torch.ones(2)
        >>> muon = Muon(weights, lr=0.1)
        >>> muon.state[weights[0]]["momentum_buffer"] = torch.ones(2)
        >>> try: check_stepped_here(muon, weights)
        ... except ConfigurationError as error: str(error).split(",")[0]
        'Muon steps 1 of 2 parameters on this rank'
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return  # hooks on its step may communicate, e.g. to report a norm, but the step itself does not
    known = set(map(id, trained))
    stepped = [p for p in _parameters([optimizer]) if id(p) in known and p.grad is not None]
    kept = sum(bool(optimizer.state.get(parameter)) for parameter in stepped)
    if kept < len(stepped):
        raise _shared_out(type(optimizer).__name__, kept, len(stepped), "a distributed Muon does")


def _shared_out(name: str, held: int, wanted: int, alike: str) -> ConfigurationError:
    """Return the error for an optimizer that steps only its rank's share of the parameters."""
    return ConfigurationError(
        f"{name} steps {held} of {wanted} parameters on this rank, and takes the others from other "
        f"ranks, as {alike}: averaged, every parameter would learn from one rank's data alone.  Give "
        f"each rank a whole optimizer; {_ALIKE}"
    )


def check_steps_some(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Refuse optimizers that step no parameter of the model, e.g. because they were made from a copy.

    Raises:
        ConfigurationError: none of the optimizers steps any of the parameters that train.

    Example:
        >>> net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> check_steps_some([torch.optim.SGD(net.parameters())], net)
        >>> try: check_steps_some([torch.optim.SGD(other.parameters())], net)
        ... except ConfigurationError as error: str(error).split(";")[0]
        'SGD steps none of the 2 parameters of the model'
    """
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if optimizers and trained and trained.isdisjoint(map(id, _parameters(optimizers))):
        names = " and ".join(dict.fromkeys(type(one).__name__ for one in optimizers))
        raise ConfigurationError(
            f"{names} steps none of the {len(trained)} parameters of the model; make it from "
            "model.parameters() once the model is complete (loaded, converted, sharded); for copies of "
            "them, e.g. in fp32, attach(torch.nn.ParameterList(copies), optimizer), or with SGD omit the "
            "optimizer"
        )


def _parameters(several: Sequence[Any]) -> list[Tensor]:
    groups = [group for one in several for group in getattr(one, "param_groups", ())]
    return [parameter for group in groups for parameter in group["params"]]


def held_by(optimizers: Sequence[Optimizer], trained: Mapping[str, Tensor]) -> str:
    """Return a fingerprint of the parameters that the optimizers step; ranks compare it.

    Example:
        >>> net = torch.nn.Linear(2, 2)
        >>> held_by([torch.optim.SGD([net.weight])], dict(net.named_parameters()))
        '1 of 2 parameters (5d6974eb)'
    """
    steps = set(map(id, _parameters(optimizers)))
    names = [name for name, parameter in trained.items() if id(parameter) in steps]
    return f"{len(names)} of {len(trained)} parameters ({crc32(repr(names).encode()):08x})"


def treatment_of(optimizers: Sequence[Optimizer], *, noise_correction: bool) -> str:
    """Describe how the updates of these optimizers are treated before they are averaged.

    Example:
        >>> treatment_of([torch.optim.Adagrad([torch.zeros(1)])], noise_correction=True)
        "Adagrad's steps are lengthened, because averaging them over ranks would shorten them"
    """
    corrected = "are corrected for the noise of a single rank's gradients"
    lengthened = "are lengthened, because averaging them over ranks would shorten them"
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
