"""Bind a model to a flat vector of its parameters and, optionally, buffers and optimizer moments."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from sparsync.errors import NonFiniteGradientError, require
from sparsync.fields import Values
from sparsync.kernels import divide_
from sparsync.transports.agree import agree, digest, divergences
from sparsync.transports.communicator import Communicator, bytes_of
from sparsync.units import local_of, writable

__all__ = [
    "Binding",
    "BufferRule",
    "MomentRule",
    "NonFiniteRule",
    "averaged_buffers",
    "floating",
    "saved_buffers",
    "states_of",
]

BufferRule = Literal["average", "local"]
MomentRule = Literal["local", "average", "reset"]
NonFiniteRule = Literal["raise", "spread"]

# Scalars in the states of torch's optimizers.  Shapes do not distinguish them from the moments of a
# parameter that has no dimensions.
_NUMBERS: Final = frozenset({"step", "mu_product", "eta", "mu"})


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that ``state_dict`` saves, i.e. all but those with ``persistent=False``.

    Sparse and expanded buffers are left out and stay local, because they cannot be written in place.
    """
    # This set of names is private (PyTorch 2.13), but the only public alternative is ``state_dict``,
    # which would run the state-dict hooks of the model's classes.
    unsaved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name not in unsaved and writable(buffer)
    }


def floating(tensor: Tensor) -> bool:
    """Return whether a tensor holds floating-point numbers that torch can add; it cannot with 8 bits."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def averaged_buffers(model: nn.Module) -> list[str]:
    """Return the names of the saved buffers that can be averaged: those with finite float values.

    A buffer that holds Inf before training begins is a constant, such as an attention mask.  It must not
    be averaged: -inf minus -inf is NaN, which would look like a broken rank.
    """
    numbers = {n: b for n, b in saved_buffers(model).items() if floating(b)}
    return [name for name, buffer in numbers.items() if bool(torch.isfinite(buffer).all())]


def states_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, Mapping[str, Any]]:
    """Return an optimizer's state for each parameter, or the state that a first step would create.

    For torch's own optimizers, a trial step on tensors without memory creates this state at no cost.
    Other optimizers are not tried, because their step may do anything, even exchange messages.  For such
    an optimizer, only parameters that it has already stepped are returned.
    """
    own = {parameter: kept for parameter, kept in optimizer.state.items() if kept}
    if not type(optimizer).__module__.startswith("torch.optim"):
        # A state without tensors may come from the constructor: Moonlight's Muon marks there which
        # parameters it orthogonalises, and creates moments in its first step.
        return {p: kept for p, kept in own.items() if any(map(torch.is_tensor, kept.values()))}
    if {p for group in optimizer.param_groups for p in group["params"]} <= own.keys():
        return own
    return _step_without_memory(optimizer) | own


def _step_without_memory(optimizer: torch.optim.Optimizer) -> dict[Tensor, Mapping[str, Any]]:
    """Return the state that an optimizer's first step creates, from a step of a copy without memory."""
    # build the copy by hand: deepcopy would copy the moments, and a subclass's constructor may differ
    double, real = object.__new__(type(optimizer)), dict[Tensor, Tensor]()
    double.__dict__ = dict(optimizer.__dict__)
    double.state, double.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        without = []
        for parameter in group["params"]:
            twin = nn.Parameter(local_of(parameter.detach()).to("meta"), parameter.requires_grad)
            twin.grad = torch.empty_like(twin)
            real[twin] = parameter
            without.append(twin)
        # these options do not work on the meta device
        plain: dict[str, Any] = {
            key: False for key in ("foreach", "fused", "capturable") if key in group
        }
        double.param_groups.append({**group, **plain, "params": without})
    step: Any = type(optimizer).step
    # ASGD and Adafactor raise an error when they read a number from a tensor without memory, but their
    # state exists by then
    with suppress(Exception):
        # call the function inside torch's wrapper (``profile_hook_step``), so that no step hook runs
        getattr(step, "__wrapped__", step)(double)
    return {real[twin]: kept for twin, kept in double.state.items()}


@final
class Binding:
    """Reads a model as a vector, and writes a vector into the same tensors.

    The vector holds trained parameters (each once), floating-point buffers and moments, in this order.
    It is float64 if a parameter or buffer is float64, and otherwise float32.  The model's tensors are
    chosen when the binding is made, the moments when averaging begins.  Tensors are looked up by name
    every time, because modules may replace their buffers, and optimizers their state.

    Attributes:
        initial: the vector when the binding was made; None if ranks may start with different models,
            and once averaging has begun.
        left_out: buffers that are not averaged because, when the binding was made, they held NaN, Inf or
            numbers too large to be summed over the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        buffers: BufferRule,
        optimizer: torch.optim.Optimizer | None,
        moments: MomentRule,
        nonfinite: NonFiniteRule,
    ) -> None:
        for name, value, choices in (
            ("buffers", buffers, get_args(BufferRule)),
            ("moments", moments, get_args(MomentRule)),
            ("nonfinite", nonfinite, get_args(NonFiniteRule)),
        ):
            require(value in choices, f"{name} is {value!r}; choose {' or '.join(choices)}")
        require(
            moments == "local" or optimizer is not None,
            f"moments is '{moments}' but no optimizer was given; give optimizer=, which holds them",
        )
        _check_model(model)
        self.model, self.comm, self.nonfinite = model, comm, nonfinite
        self.buffers, self.optimizer, self.moments = buffers, optimizer, moments
        # decide once, before training: a buffer that becomes infinite later is broken, not a mask
        self._averaged = {
            name
            for name in averaged_buffers(model)
            if buffers == "average" and _sums(model.get_buffer(name), comm.world_size)
        }
        numbers = [n for n, b in saved_buffers(model).items() if floating(b)]
        self.left_out = [n for n in numbers if buffers == "average" and n not in self._averaged]
        ruled = self._ruled(self._tensors())
        self._shapes = {name: tensor.shape for name, tensor in ruled.items()}
        wide = any(tensor.dtype == torch.float64 for tensor in ruled.values())
        self.trained = {n: p for n, p in ruled.items() if p.requires_grad}
        self._dtype = torch.float64 if wide else torch.float32
        # parameters whose moments are not known yet, because an unknown optimizer has not stepped them
        self._unmoved: list[Tensor] = []
        self._known_moments = self._find_moments()
        self.initial: Tensor | None = self.read()
        # Frozen parameters are not in ``initial``.  Keep digests of their first values, because the
        # script may change them before averaging begins, e.g. if it updates a teacher model.
        tensors = self._tensors()
        frozen = [n for n, _ in model.named_parameters() if n in tensors and n not in self._shapes]
        self._frozen = {name: digest(tensors[name]) for name in frozen}

    def follow_loads(self, loaded: Callable[[Mapping[str, Tensor]], None]) -> list[RemovableHandle]:
        """Call ``loaded`` after every ``load_state_dict`` of the model or of one of its modules.

        ``loaded`` gets the tensors of the loaded module by name, because ``assign=True`` replaces
        tensors.  Until averaging begins, every load also updates ``initial``.
        """
        sizes = self._sizes()
        # remember slices instead of views, which would keep ``initial`` alive after the first step
        places: dict[str, slice | None] = dict.fromkeys(self._frozen)
        places |= {
            name: slice(end - size, end)
            for name, size, end in zip(self._layout(), sizes, accumulate(sizes), strict=True)
        }
        # look tensors up by identity, because a tied tensor may be loaded under any of its names
        named = dict(self.model.named_parameters()) | saved_buffers(self.model)
        found = {id(named[name]): (name, place) for name, place in places.items() if name in named}
        hooks = []
        for module in self.model.modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            its = {name: found[id(tensor)] for name, tensor in own if id(tensor) in found}
            hook = _LoadHook(self, its, loaded)
            handle = module.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
            hooks.append(handle)
        return hooks

    @torch.no_grad()
    def reread(
        self, module: nn.Module, places: Mapping[str, tuple[str, slice | None]]
    ) -> dict[str, Tensor]:
        """Return a module's tensors that are in the vector; before averaging, also update ``initial``."""
        tensors = {}
        for own, (name, place) in places.items():
            tensor: Tensor | None = getattr(module, own, None)
            if tensor is None:  # the module has changed; the next ``read`` will refuse it
                continue
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            if place is None:
                self._frozen[name] = digest(tensor)
                continue
            tensors[name] = tensor
            if self.initial is not None:
                self.initial[place] = tensors[name].reshape(-1)
        return tensors

    # ---- the vector -------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return the model as a new vector; refuse NaN or Inf unless ``nonfinite`` allows them."""
        tensors = self._travelling()
        device = next((t.device for t in tensors.values() if t is not None), None)
        # begin with an empty piece: a model may have no parameters, and ``torch.cat`` needs a tensor
        pieces = [torch.zeros(0, dtype=self._dtype, device=device)]
        for size, tensor in zip(self._sizes(), tensors.values(), strict=True):
            piece = pieces[0].new_zeros(size) if tensor is None else tensor.to(pieces[0])
            pieces.append(piece.reshape(-1))
        vector = torch.cat(pieces)
        # check the sum of the whole vector first, which takes one pass and a single wait for a GPU
        if self.nonfinite == "raise" and not vector.sum().isfinite():
            # a tensor whose sum overflows counts as broken, even if its elements are finite
            for name, piece in zip(tensors, torch.split(vector, self._sizes()), strict=True):
                self._check_finite(name, piece)
        return vector

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if not tensor.sum().isfinite():
            raise NonFiniteGradientError(
                f"rank {self.comm.rank}: NaN or Inf in '{name}'; it was not averaged, and other ranks' "
                "models are clean; load a checkpoint, or average it anyway with nonfinite='spread'"
            )

    @torch.no_grad()
    def write_(self, vector: Tensor) -> None:
        """Write a vector back into the same tensors, which keep their dtypes and strides."""
        # write in place, because optimizers, views and compiled graphs refer to these tensors
        tensors = self._travelling().values()
        for tensor, piece in zip(tensors, torch.split(vector, self._sizes()), strict=True):
            if tensor is not None:
                tensor.copy_(piece.view(tensor.shape))

    def reset_moments(self) -> None:
        """Drop the optimizer's state if ``moments`` is "reset"; called when an average is taken."""
        if self.moments == "reset" and self.optimizer is not None:
            self.optimizer.state.clear()  # clears step counters too, as before the first step

    # ---- with the other ranks ---------------------------------------------------------------------

    def forget_start(self) -> None:
        """After a restore, let every rank start with its current model when averaging begins."""
        self.initial = None

    async def start(self) -> Tensor:
        """Compare all ranks' models, and return the vector from which all of them start.

        After a restore, ranks start from their current models.  Otherwise they start from ``initial``,
        with zeros for moments that did not exist then; a ``PeerError`` names the first tensor that
        differs.

        Cost: every rank sends 8 bytes per tensor, twice, and computes a digest of all parameters.
        """
        self._unmoved = []
        self._known_moments = self._find_moments()
        vector, start, self.initial = self.read(), self.initial, None
        tensors = self._tensors()
        labels = [
            f"'{name}' {list(t.shape)} {t.dtype}{'' if name in self._shapes else ', stays local'}"
            for name, t in tensors.items()
        ]
        labels += [f"'{name}' {list(p.shape)}" for name, (p, _) in self._known_moments.items()]
        most = await self.comm.allreduce(
            torch.tensor([len(labels)], device="cpu"), "agreement", "max"
        )
        # ``agree`` needs the same number of facts on every rank
        labels += ["nothing"] * (int(most) - len(labels))
        # Names and shapes are compared first.  If these differ, ranks would later exchange different
        # numbers of facts, or vectors of different lengths.
        await agree(
            self.comm, {f"tensor {i} of the model": label for i, label in enumerate(labels)}
        )
        if start is None:
            return vector
        # the first step may have created moments since; they count as zeros at the start
        missing = vector.numel() - start.numel()
        start = torch.cat([start.to(vector.device), vector.new_zeros(missing)])
        values = dict(zip(self._layout(), torch.split(start, self._sizes()), strict=True))
        advice = "a digest; seed all ranks alike or load one checkpoint"
        await agree(
            self.comm,
            {
                f"the initial values of '{name}' ({advice})": known
                for name, known in [
                    *((n, digest(t)) for n, t in values.items()),
                    *self._frozen.items(),
                ]
            },
        )
        return start

    @torch.no_grad()
    async def settle(self, comm: Communicator) -> None:
        """Make the tensors outside the vector equal on all ranks; equal tensors are not touched.

        Floating-point tensors become their mean over the ranks, and must be finite unless they are in
        ``left_out`` or ``nonfinite`` is "spread".  Other tensors take the value of ``comm``'s first rank.

        Cost: as ``divergences``, plus an allreduce or allgather for each tensor that differs.
        """
        # ``divergences`` names the same tensors in the same order on all ranks, so all ranks call the
        # same collectives
        rest = {name: t for name, t in self._tensors().items() if name not in self._shapes}
        for torn in await divergences(comm, rest):
            tensor = rest[torn.name]
            if floating(tensor):
                if self.nonfinite == "raise" and torn.name not in self.left_out:
                    self._check_finite(torn.name, tensor)
                wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
                total = await comm.allreduce(tensor.to(wide).reshape(-1), "settle")
                tensor.copy_(divide_(total, comm.world_size).view(tensor.shape))
            else:
                first = (await comm.allgather(bytes_of(tensor), "settle"))[0]
                tensor.copy_(first.view(tensor.dtype).view(tensor.shape))

    # ---- the tensors in the vector ----------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        """Return the model's parameters, each once, and its saved buffers; complex ones as real."""
        named: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if writable(p)}
        named |= saved_buffers(self.model)
        return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in named.items()}

    def _ruled(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to average: parameters that are trainable now, and the averaged buffers."""
        trains = {name: p.requires_grad for name, p in self.model.named_parameters()}
        return {
            name: tensor
            for name, tensor in tensors.items()
            if trains.get(name, name in self._averaged)
        }

    def _travelling(self) -> dict[str, Tensor | None]:
        """Return the tensors that make up the vector, with None for a moment that does not exist yet."""
        tensors = self._tensors()
        # also average parameters that were frozen later: GAN training freezes its networks alternately
        now = {name: tensors[name].shape for name in self._shapes if name in tensors}
        now |= {name: tensor.shape for name, tensor in self._ruled(tensors).items()}
        changed = sorted(name for name, _ in now.items() ^ self._shapes.items())
        require(
            not changed,
            f"'{changed and changed[0]}' was added, removed, reshaped or unfrozen since the averager "
            "was made; make a new one, on all ranks, when the model changes",
        )
        require(
            not any(map(self._moments_of, self._unmoved)),
            "moments='average': the optimizer has created moments since averaging began, and these are "
            "not averaged; begin averaging after its first step on every group, on all ranks",
        )
        found: dict[str, Tensor | None] = {name: tensors[name] for name in self._shapes}
        for name, (parameter, kind) in self._known_moments.items():
            found[name] = self._moments_of(parameter).get(kind)
        return found

    def _layout(self) -> dict[str, torch.Size]:
        return self._shapes | {name: p.shape for name, (p, _) in self._known_moments.items()}

    @property
    def rest(self) -> dict[str, int]:
        """The sizes by name of buffers and moments, which follow the trained parameters in the vector."""
        named = self._layout().items()
        return {n: shape.numel() for n, shape in named if n not in self.trained and shape.numel()}

    def kind(self) -> Values | None:
        """Return the kind of the vector; None if its moments become known only after a step."""
        if self._unmoved:
            return None
        return Values((sum(self._sizes()),), self._dtype)

    def _sizes(self) -> list[int]:
        return [shape.numel() for shape in self._layout().values()]

    def _find_moments(self) -> dict[str, tuple[Tensor, str]]:
        """Return the parameter and state key of every moment to average, including future moments.

        A parameter that has no state in an unknown optimizer is assumed to get the same moments as the
        other parameters in its group.
        """
        if self.moments != "average" or self.optimizer is None:
            return {}
        names = {id(p): n for n, p in self.model.named_parameters() if n in self._shapes}
        states, found = states_of(self.optimizer), dict[str, tuple[Tensor, str]]()
        for group in self.optimizer.param_groups:
            own = {p: _moments_in(states.get(p, {}), p) for p in group["params"] if id(p) in names}
            usual = {kind for kinds in own.values() for kind in kinds}
            for p, kinds in own.items():
                for kind in sorted(kinds if states.get(p) else usual):
                    found[f"{names[id(p)]} ({kind})"] = p, kind
            if not usual:
                self._unmoved += own
        return found

    def _moments_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return a parameter's moments by state key."""
        state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
        return _moments_in(state, parameter)


def _sums(buffer: Tensor, world_size: int) -> bool:
    """Return whether the buffer's sum over elements and ranks is finite.

    It is infinite for an attention mask that holds ``torch.finfo(dtype).min`` instead of -inf.
    """
    wide = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
    # P + 1 models, because Wagma adds a late rank's own model to the sum
    return bool((wide.abs().sum() * (world_size + 1)).isfinite())


def _moments_in(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors in a parameter's state that have its shape, except step counts."""
    return {
        kind: value
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.is_floating_point()
        if value.shape == parameter.shape and (value.dim() or kind not in _NUMBERS)
    }


@final
class _LoadHook:
    """A hook that records the weights loaded into a module.

    Copying a model also copies its hooks, but no averager is bound to the copy, so a copied hook does
    nothing.
    """

    def __init__(
        self,
        binding: Binding | None = None,
        places: Mapping[str, tuple[str, slice | None]] = MappingProxyType({}),
        loaded: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        # a weak reference, because the averager may be deleted before the model
        self._binding = None if binding is None else weakref.ref(binding)
        self._places, self._loaded = places, loaded

    def __call__(self, module: nn.Module, _keys: object) -> None:
        """Record the loaded weights; PyTorch calls this for every loaded module, children first."""
        if self._binding is not None and (binding := self._binding()) is not None:
            tensors = binding.reread(module, self._places)
            if self._loaded is not None:
                self._loaded(tensors)

    def __reduce__(self) -> tuple[type[_LoadHook], tuple[()]]:
        return _LoadHook, ()


def _check_model(model: nn.Module) -> None:
    """Refuse a model that averages gradients itself or does not hold its whole parameters."""
    # compare the names of base classes, because FSDP2 derives a new class from each module's class
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    require(
        not wrappers & bases,
        f"averaging needs models that train alone but this one is wrapped "
        f"({', '.join(sorted(wrappers & bases))}), which averages gradients or shards; give the plain "
        "module",
    )
    for name, parameter in model.named_parameters():
        kind = type(parameter).__name__
        require(
            kind != "DTensor" and not is_lazy(parameter) and not parameter.is_meta,
            f"'{name}' is a {kind} without values of its own; averaging needs whole tensors: "
            "materialise the model (a first forward pass, or load it) and do not shard it",
        )
