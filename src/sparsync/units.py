"""Units: the fixed runs of parameters that are selected and exchanged together.

Units follow registration order, not DDP's buckets.  DDP rebuilds its buckets after the first step, so
the elements of a per-bucket residual would then belong to the wrong parameters.  In most papers, the
whole model is one unit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from sparsync.errors import ConfigurationError, require

__all__ = [
    "Kind",
    "Piece",
    "Slot",
    "Unit",
    "check_kinds",
    "check_same_parameters",
    "check_stepped_later",
    "check_unit_bytes",
    "check_values",
    "flatten",
    "is_finite",
    "kinds_of",
    "local_of",
    "output_parameters",
    "plan_units",
    "replicated_tensors",
    "substituted",
    "training",
    "unflatten",
    "writable",
]

# torch's mark on parameters that an optimizer steps inside ``backward()``; torch never removes it
_STEPPED_INSIDE: Final = "_in_backward_optimizers"


# A piece is a box within a parameter, given by the keys "shape", "offset" and "size":
# ``parameter.reshape(shape)[offset[0] : offset[0] + size[0], ...]``, flattened.
Piece = dict[str, list[int]]

Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in its unit: elements ``[start, start + size)``."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Unit:
    """A run of parameters, in registration order, whose gradients have the same dtype and device."""

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    device: torch.device
    dense: bool = False  # exchanged whole, regardless of the algorithm
    output: bool = False  # the model's output layer, which some algorithms treat separately

    @property
    def layers(self) -> list[int]:
        """The number of elements of every parameter."""
        return [slot.size for slot in self.slots]

    @property
    def size(self) -> int:
        """The number of elements n."""
        return self.slots[-1].start + self.slots[-1].size if self.slots else 0

    def name_at(self, index: int) -> str:
        """Return the name of the parameter that holds element ``index``."""
        starts = [slot.start for slot in self.slots]
        return self.slots[bisect_right(starts, index) - 1].name

    def entries(self, density: float) -> int:
        """Return k for a density: ``density * n``, rounded, from 1 to n; for a dense unit, k is n.

        Example:
            >>> unit, = plan_units([("w", torch.zeros(300))])
            >>> unit.entries(0.01), unit.entries(1e-9), unit.entries(1.0)
            (3, 1, 300)
        """
        return self.size if self.dense else min(self.size, max(1, round(density * self.size)))


def check_unit_bytes(size: int | None, name: str = "unit_bytes") -> None:
    """Refuse an invalid unit size."""
    whole = size is None or (type(size) is int and size >= 1)
    require(whole, f"{name} is {size!r}; give a whole number of at least 1, or None")


def plan_units(
    parameters: Iterable[tuple[str, Tensor]],
    unit_bytes: int | None = None,
    compress: Callable[[str, Tensor], bool] | None = None,
    output: Collection[str] = (),
) -> list[Unit]:
    """Group named parameters into units, in the order given.

    Args:
        parameters: names and tensors; the gradients have the same shapes, dtypes and devices.
        unit_bytes: a unit is complete once it has this many bytes.  With None, there is one unit per
            dtype and device.  A parameter is never split.
        compress: takes a name and a tensor, and returns whether the parameter is exchanged sparsely;
            others are exchanged whole, in separate units.  With None, all are exchanged sparsely.
        output: names of the output layer's parameters, if they need separate units.

    Example:
        >>> a, b = torch.zeros(6), torch.zeros(4)
        >>> [[s.name for s in u.slots] for u in plan_units([("a", a), ("b", b)], unit_bytes=16)]
        [['a'], ['b']]
    """
    check_unit_bytes(unit_bytes)
    units: list[Unit] = []
    open_runs: dict[tuple[torch.dtype, torch.device, bool, bool], list[Slot]] = {}
    for name, tensor in parameters:
        if not tensor.is_floating_point():
            raise ConfigurationError(
                f"'{name}' is {tensor.dtype}, whose entries have no magnitudes to select by; keep its "
                "real and imaginary part as two parameters, or torch.view_as_real of it as one"
            )
        dense = compress is not None and not compress(name, tensor)
        kind = (tensor.dtype, tensor.device, dense, name in output and not dense)
        run = open_runs.setdefault(kind, [])
        start = run[-1].start + run[-1].size if run else 0
        run.append(Slot(name, start, tensor.numel()))
        if unit_bytes is not None and (start + tensor.numel()) * tensor.itemsize >= unit_bytes:
            units.append(Unit(tuple(open_runs.pop(kind)), *kind))
    units.extend(Unit(tuple(run), *kind) for kind, run in open_runs.items())
    return units


def output_parameters(model: nn.Module, given: Collection[str] | None = None) -> Collection[str]:
    """Return the names of the output layer's parameters.

    The output layer is taken to be the module that was registered last.  If the user has ``given`` names,
    which must exist, they are returned instead.

    Example:
        >>> output_parameters(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        ['2.weight', '2.bias']
    """
    # a tied weight also belongs to the last module, but is named after the first module that holds it
    everywhere = list(model.named_parameters(remove_duplicate=False))
    last = everywhere[-1][0].rpartition(".")[0] if everywhere else ""
    names = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
    found = [names[id(p)] for name, p in everywhere if name.rpartition(".")[0] == last]
    if given is None:
        return found
    known = names.values()
    unknown = [given] if isinstance(given, str) else [name for name in given if name not in known]
    if unknown:
        raise ConfigurationError(
            f"output_layer has {unknown[0]!r}, which is not the name of a parameter; give a list "
            "of names, "
            f"e.g. {found}"
        )
    return given


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor (a DTensor's local part); it shares the tensor's memory."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)  # isinstance would import DTensor, in 0.4 s
    return tensor if to_local is None else to_local()


def is_finite(tensor: Tensor) -> bool:
    """Return whether this rank's part of a tensor has no NaN or Inf; sparse tensors are allowed."""
    part = local_of(tensor)
    # values with the same index are checked one by one; their sum is assumed to be finite too
    return bool(torch.isfinite(part._values() if part.is_sparse else part).all())


def writable(tensor: Tensor) -> bool:
    """Return whether each element of a tensor has its own memory; False if sparse or expanded.

    Example:
        >>> [writable(one) for one in (torch.eye(2), torch.eye(2).to_sparse(), torch.ones(1).expand(2))]
        [True, False, False]
    """
    return tensor.layout is torch.strided and all(
        step or size <= 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of the same dtype, flattened; the result shares memory with a single tensor."""
    joined: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return joined


def unflatten(joined: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a joined vector in the shapes of ``tensors``."""
    return list(_unflatten_dense_tensors(joined, tensors))  # type: ignore[no-untyped-call]


def replicated_tensors(model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the tensors that replicas share: parameters and the statistics of ``SyncBatchNorm``.

    Tensors named in ``ignored`` are private to each rank and left out; so are sparse constants.
    """
    synchronised = {
        f"{name}.{buffer}" if name else buffer: tensor
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
        for buffer, tensor in module.named_buffers(recurse=False)
    }
    named = {**dict(model.named_parameters()), **synchronised}
    return {
        name: local_of(tensor)
        for name, tensor in named.items()
        if name not in ignored and writable(tensor)
    }


def check_values(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters without values, i.e. of lazy modules or on the meta device.

    Example:
        >>> try: check_values(nn.LazyLinear(2).named_parameters())
        ... except ConfigurationError as error: str(error).split(";")[0]
        "'weight' has no values yet"
    """
    for name, parameter in named:
        if parameter.device.type == "meta" or isinstance(parameter, nn.UninitializedParameter):
            raise ConfigurationError(
                f"'{name}' has no values yet; materialise the model (load it, or a first forward pass) "
                "before attach"
            )


def training(model: nn.Module) -> list[Any]:
    """Return the identity, dtype and device of each trained parameter, once per module that holds it.

    Two such lists can be compared fast enough for every step.  The identity is negated once an
    optimizer steps the parameter inside ``backward()`` (see ``check_stepped_later``).
    """
    return [
        (
            -id(parameter) if hasattr(parameter, _STEPPED_INSIDE) else id(parameter),
            parameter.dtype,
            parameter.device,
        )
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None and parameter.requires_grad
    ]


def kinds_of(parameters: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Return the dtype and device of parameters, by name."""
    return {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}


def check_same_parameters(
    model: nn.Module,
    exchanged: Mapping[str, Tensor],
    ignored: Collection[Tensor] = (),
    alone: Collection[str] = (),
    kinds: Mapping[str, Kind] | None = None,
) -> None:
    """Refuse a model that trains parameters which are neither ``exchanged`` nor ``ignored``.

    Such parameters were unfrozen, added or replaced after the exchange was set up.  Parameters whose
    ``kinds`` have changed are also refused (``kinds_of``).  Parameters named in ``alone`` are private
    to each rank, and not checked.  Tensors that ``torch.func.functional_call`` substitutes for parameters
    are ignored, because they exist only during that call.

    Example:
        >>> model = nn.Linear(2, 1); exchanged = dict(model.named_parameters())
        >>> model.bias = nn.Parameter(torch.zeros(1))
        >>> try: check_same_parameters(model, exchanged)
        ... except ConfigurationError as error: str(error).split(",")[0]
        "'bias' was replaced by another parameter after the exchange was set up"
    """
    check_stepped_later(model, alone)
    known = {*exchanged.values(), *ignored}
    for name, parameter in model.named_parameters():
        if name in alone or parameter in known or not isinstance(parameter, nn.Parameter):
            continue
        if parameter.requires_grad and name in exchanged:
            raise ConfigurationError(
                f"'{name}' was replaced by another parameter after the exchange was set up, as by "
                "load_state_dict(assign=True) or a new layer: neither the exchange nor the optimizer "
                "knows it; load with assign=False, which copies values, and replace layers before the "
                "optimizer, DDP and attach"
            )
        if parameter.requires_grad:
            raise ConfigurationError(
                f"'{name}' trains now but was frozen or not there when the exchange was set up; ranks "
                "would drift apart in it: set up again (for DDP: wrap again, then attach)"
            )
    check_kinds(exchanged, kinds or {})


def check_kinds(parameters: Mapping[str, Tensor], kinds: Mapping[str, Kind]) -> None:
    """Refuse parameters whose dtype or device has changed since ``kinds_of`` was called."""
    for name, before in kinds.items():
        now = parameters[name].dtype, parameters[name].device
        if now != before:
            was, its = (f"{dtype} on {device}" for dtype, device in (before, now))
            raise ConfigurationError(
                f"'{name}' was {was} when the exchange was set up, and is {its} now; convert and move "
                "the model before the optimizer, DDP and attach"
            )


def check_stepped_later(model: nn.Module, alone: Collection[str] = ()) -> None:
    """Refuse an optimizer that steps inside ``backward()``, i.e. before the gradient is exchanged."""
    for name, parameter in model.named_parameters():
        if name not in alone and hasattr(parameter, _STEPPED_INSIDE):
            raise ConfigurationError(
                f"'{name}' is stepped inside backward(), by torch's _apply_optimizer_in_backward, before "
                "its gradient is exchanged; build the model without it, and step an optimizer after "
                "backward()"
            )


def substituted(model: nn.Module) -> bool:
    """Return whether ``torch.func.functional_call`` currently substitutes tensors for parameters.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> handle = net.register_forward_pre_hook(lambda net, _: print(substituted(net)))
        >>> out = torch.func.functional_call(net, {"bias": torch.ones(1)}, torch.ones(2))
        True
        >>> substituted(net)
        False
    """
    return any(not isinstance(parameter, nn.Parameter) for parameter in model.parameters())
