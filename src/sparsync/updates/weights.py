"""A model as one vector, for the exchange of updates."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Final, final

import torch
from torch import Tensor, nn

from sparsync.averaging.binding import averaged_buffers, floating, saved_buffers
from sparsync.errors import ConfigurationError, require
from sparsync.feedback.changes import Changes
from sparsync.gradients.hierarchy import Node
from sparsync.units import check_values, is_finite, local_of, writable
from sparsync.updates.fragments import Weights
from sparsync.updates.gradient_noise import GradientNoise
from sparsync.updates.outer_engine import OuterEngine

__all__ = ["ModelWeights", "OwnWeights", "trained_of"]

_UNSEEN: Final = (0, -1)  # the mark of a buffer that has not been inspected yet
_SAMPLES: Final = "(samples of gradients)"  # no buffer can have this name


def trained_of(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Return the parameters whose updates are exchanged, by name.

    Raises:
        ConfigurationError: a parameter is complex, has no values yet, or is not on the device of the
            first parameter.
    """
    trained = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    places: dict[torch.device, str] = {}  # the first parameter on each device
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise ConfigurationError(
                f"'{name}' is {parameter.dtype}; make a parameter of its torch.view_as_real"
            )
        places.setdefault(parameter.device, name)
    check_values(trained.items())
    told = ", ".join(f"'{name}' on {device}" for device, name in places.items())
    require(
        len(places) < 2,
        f"parameters are on several devices ({told}), but updates are exchanged as one vector; move the "
        "model to one device per rank, or choose exchange='gradients'",
    )
    return trained


def _mark(buffer: Tensor) -> tuple[int, int]:
    """Return a value that changes when a buffer is written to or replaced."""
    return id(buffer), buffer._version


@final
class ModelWeights(Weights):
    """A model as one vector: its trained parameters, floating-point buffers, and samples of gradients.

    The vector is float64 if any of these tensors is, otherwise float32.  Inside a node, a rank reads only
    its own runs of the vector; writing is collective in the node, and gathers the runs of all its ranks.

    Buffers that contain NaN or Inf initially are presumed constant.  They are read as zeros and never
    written.  They still have a place in the vector, so a saved state fits whatever their values are.

    Attributes:
        left_out: the names of these buffers.
    """

    cure = ""  # no advice is needed, because ``attach`` knows the optimizers

    def __init__(
        self,
        module: nn.Module,
        trained: Mapping[str, Tensor],
        buffers: bool,
        node: Node | None = None,
        noise: GradientNoise | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self.noise = noise
        self._module, self.trained, self.node = module, dict(trained), node
        self._divisor = 1 if node is None else node.comm.world_size
        self._rank = 0 if node is None else node.comm.rank
        numbers = {n: b for n, b in saved_buffers(module).items() if floating(b)}
        self.buffers = [name for name in numbers if name not in ignored] if buffers else []
        self._local = frozenset(ignored) if buffers else None  # None: all buffers stay local
        # versions, by name, of the parameters that are not trained; the model itself may write them
        self._frozen = {
            name: local_of(parameter)._version
            for name, parameter in module.named_parameters()
            if name not in trained and name not in ignored and writable(parameter)
        }
        # These buffers are not exchanged, because ranks would refuse every exchange with NaN or Inf.
        # ``strayed`` reports such a buffer if it is not constant after all.
        self.left_out = frozenset(self.buffers) - frozenset(averaged_buffers(module))
        # the marks of these buffers, to detect writes
        self._marks = {name: _mark(numbers[name]) for name in self.left_out}
        self._sharded = any(hasattr(parameter, "to_local") for parameter in trained.values())
        tensors = self._tensors()
        self._names = [name for name, _ in tensors]
        self._sizes = {name: tensor.numel() for name, tensor in tensors}
        self._ends = list(accumulate(-(-n // self._divisor) for n in self._sizes.values())) or [0]
        self._like = tensors[0][1].new_empty(0) if tensors else torch.zeros(0, device="cpu")
        wide = any(tensor.dtype == torch.float64 for _, tensor in tensors)
        self.dtype = torch.float64 if wide else torch.float32
        self.ranks = 1.0  # see ``average_over``

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that form the vector, in order, with their names."""
        samples = [] if self.noise is None else [_SAMPLES]
        return [(name, self._tensor(name)) for name in (*self.trained, *self.buffers, *samples)]

    def _tensor(self, name: str) -> Tensor:
        """Return one of the tensors that form the vector."""
        if (parameter := self.trained.get(name)) is not None:
            return local_of(parameter)
        if name == _SAMPLES and self.noise is not None:
            return self.noise.values
        # the buffer is looked up every time, because a module may replace it with a new tensor
        try:
            return local_of(self._module.get_buffer(name))
        except AttributeError:
            raise ConfigurationError(
                f"buffer '{name}', which ranks average, was removed or set to None after attach; "
                "register it with persistent=False, or close() the handle first and attach again"
            ) from None

    @property
    def rest(self) -> dict[str, int]:
        """The sizes of buffers and samples, which follow the parameters in the vector."""
        named = self._tensors()[len(self.trained) :]
        return {name: -(-t.numel() // self._divisor) for name, t in named if t.numel()}

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._like.device

    @property
    def itemsize(self) -> int:
        """The number of bytes per element of a parameter."""
        return self._like.itemsize

    def exchanged(self, left_out: Collection[str] | None = None) -> list[str]:
        """Return the names of all exchanged tensors, given the buffers to leave out."""
        left_out = self.left_out if left_out is None else left_out
        return [*self.trained, *(name for name in self.buffers if name not in left_out)]

    def exchanged_buffers(self) -> dict[str, Tensor]:
        """Return the exchanged buffers by name."""
        return {name: self._tensor(name) for name in self.buffers if name not in self.left_out}

    def frozen(self) -> dict[str, Tensor]:
        """Return the parameters that did not train when the model was attached, by name."""
        named = dict(self._module.named_parameters())
        return {name: local_of(named[name]) for name in self._frozen if name in named}

    def others(self, *, unwritten: bool = False) -> dict[str, Tensor]:
        """Return the tensors that DDP would keep equal, but that are not exchanged.

        These are buffers of integers, buffers that are not saved, and buffers that were added or have
        grown after ``attach``.  They also include the frozen parameters that the model itself has written
        since then, e.g. an average of its weights; with ``unwritten``, all frozen parameters.
        """
        found = {
            name: tensor
            for name, tensor in self.frozen().items()
            if unwritten or tensor._version != self._frozen[name]
        }
        if self._local is not None:
            found |= {
                name: local_of(buffer)
                for name, buffer in self._module.named_buffers()
                if name not in self._local
                and writable(buffer)
                # a buffer that has grown since ``attach`` is not exchanged as a whole
                and (name not in self.buffers or buffer.numel() != self._sizes[name])
            }
        # shapes are part of the names, so that ranks also compare shapes
        return {f"{name} {tuple(tensor.shape)}": tensor for name, tensor in found.items()}

    def average_over(self, ranks: float) -> None:
        """Set the number of ranks over which noise is averaged; see ``Weight``."""
        self.ranks = ranks

    def leave_out(self, names: Collection[str]) -> None:
        """From now on, leave out exactly these buffers."""
        self.left_out = frozenset(names)
        self._marks = dict.fromkeys(self.left_out, _UNSEEN)

    def reshard(self) -> None:
        """Make FSDP2 free unsharded parameters that an evaluation has left, because they are stale."""
        for owner in self._module.modules() if self._sharded else ():
            if hasattr(owner, "unshard"):
                owner.reshard()  # type: ignore[operator]

    def _within(self, place: slice) -> Iterator[tuple[str, Tensor, slice, slice]]:
        """Yield each tensor in a part of the vector: name, tensor, elements, and their position."""
        start, stop = place.start or 0, self._ends[-1] if place.stop is None else place.stop
        for number in range(bisect_right(self._ends, start), len(self._ends)):
            begin = self._ends[number - 1] if number else 0
            low, high = max(begin, start), min(self._ends[number], stop)
            if low >= high and begin >= stop:
                return
            if low < high:
                name = self._names[number]
                inside, here = slice(low - begin, high - begin), slice(low - start, high - start)
                yield name, self._tensor(name), inside, here

    @torch.no_grad()
    def read(self, place: slice) -> Tensor:
        """Return a copy of a part of the vector."""
        stop = self._ends[-1] if place.stop is None else place.stop
        made = self._like.new_empty(stop - (place.start or 0), dtype=self.dtype)
        for here, found in self.pieces(place):
            made[here] = 0 if found is None else found
        return made

    @torch.no_grad()
    def pieces(self, place: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """Yield the tensors that form a part of the vector, each after its position; None means zeros."""
        for name, tensor, inside, here in self._within(place):
            # inside a node, each rank holds one run of every tensor: size / ranks elements, rounded up
            first, middle = self._rank * -(-tensor.numel() // self._divisor), here.start
            if name not in self.left_out:
                found = tensor.detach().flatten()[first + inside.start : first + inside.stop]
                found = found.to(self._like.device)  # buffers may be on another device
                middle += len(found)
                yield slice(here.start, middle), found
            if middle < here.stop:  # the last run is padded
                yield slice(middle, here.stop), None

    @torch.no_grad()
    def write(self, place: slice, values: Tensor, *, add: bool = False) -> None:
        """Overwrite a part of the vector, or add to it; inside a node, this is collective."""
        # values go to the device of the weights first; inside a node, row r holds rank r's runs
        values = values.to(self._like.device)
        rows = values[None] if self.node is None else self.node.gathered(values)
        for name, tensor, inside, here in self._within(place):
            if name in self.left_out:
                continue
            flat = tensor.view(-1) if tensor.is_contiguous() else tensor.flatten()
            size = -(-tensor.numel() // self._divisor)
            for rank, row in enumerate(rows):
                # the last run of a tensor is padded
                into = flat[rank * size + inside.start : rank * size + inside.stop]
                given = row[here][: len(into)]
                if add:
                    into.add_(given.to(flat.dtype))
                else:
                    into.copy_(given)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average buffers inside the node, whose ranks see different batches."""
        # Averaged gradients keep the weights of a node's ranks equal.  Buffers must also be equal,
        # because each rank sends only its own run of a buffer, on behalf of the whole node.
        if self.node is not None:
            for name, tensor in self._tensors()[len(self.trained) :]:
                if name in self.buffers and name not in self.left_out:
                    self.node.average_(tensor)
            self.node.check()

    def finite(self) -> bool:
        """Return whether all parameters and exchanged buffers of this rank are finite."""
        return not self.broken()

    def broken(self) -> str:
        """Return the name of a parameter or buffer of this rank that is not finite, or ""."""
        exchanged = set(self.exchanged())
        for name, tensor in self._tensors():
            if name in exchanged and not is_finite(tensor):
                left_out = " (persistent=False would leave it out)" if name in self.buffers else ""
                return f"'{name}'{left_out}"
        return ""

    def strayed(self) -> str:
        """Return the name of a buffer that was left out because of NaN or Inf and is finite now, or "".

        Each buffer is reported once.  Cost: a pass over the buffers that were written to.
        """
        now = dict(self._module.named_buffers()) if self._marks else {}
        for name, mark in list(self._marks.items()):
            if name in now and (written := _mark(now[name])) != mark:
                self._marks[name] = written
                if bool(torch.isfinite(now[name]).all()):
                    del self._marks[name]
                    return name
        return ""

    def landed(self, span: slice, shared: Tensor) -> None:
        """Receive the averages of the gradient samples, which are at the end of the vector.

        The averages are read from the ``shared`` vector, because all ranks must compute equal shares.
        The rank's own vector cannot be used: adding a late exchange to it rounds differently on each
        rank.
        """
        if self.noise is not None and any(name == _SAMPLES for name, *_ in self._within(span)):
            values = self.noise.values
            # inside a node, ``shared`` holds only this rank's runs
            own = shared[shared.numel() - -(-values.numel() // self._divisor) :].to(values.device)
            whole = own if self.node is None else self.node.gathered(own).flatten()
            values.copy_(whole[: values.numel()].view_as(values))
            self.noise.measure()


@final
class OwnWeights:
    """A rank's own weights, which are set aside while the model holds the shared weights.

    Attributes:
        changes: detects weights that the program has written.
    """

    def __init__(self, weights: ModelWeights, outer: OuterEngine) -> None:
        self.weights, self.outer = weights, outer
        self.changes = Changes(weights.trained)
        self._aside: Tensor | None = None
        # the lock is reentrant, because a signal handler may call ``shared`` while weights are swapped
        self._lock = threading.RLock()

    def check(self, what: str) -> None:
        """Inside ``shared``, refuse an action that needs this rank's own weights."""
        require(
            self._aside is None,
            f"{what} within shared(), which replaces this rank's own weights; leave that block "
            "first",
        )

    def copied(self) -> tuple[Tensor, bool]:
        """Return a copy of the weights, and whether the program wrote to them since the last step."""
        with self._lock:
            if self._aside is not None:
                return self._aside, False
            return self.weights.read(slice(0, None)), self.changes.written()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Put the shared weights into the model; then restore this rank's own weights."""
        # the rank's own weights are restored even if the block raises, because they would be lost if
        # training went on from the shared ones
        with self._lock:
            replaced = self.changes.replaced()  # the next step must still see this, and refuse it
            # read the model, because after ``go_on_with`` the engine has its own copy of the weights
            outside, before = self._aside, self.outer.read(self.weights)
            self.weights.reshard()
            self.outer.write(self.weights, self.outer.memory["shared"])
            self._aside = before if outside is None else outside
        try:
            yield
        finally:
            with self._lock:
                self.weights.reshard()  # an evaluation leaves unsharded parameters, which are stale now
                self.outer.write(self.weights, before)
                self._aside = outside
                if not replaced:
                    self.changes.remember()
