"""A model as one vector, for exchanges of updates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Final, final

import torch
from torch import Tensor, nn

from sparsync.averaging.binding import averaged_buffers, saved_buffers
from sparsync.errors import ConfigurationError
from sparsync.gradients.hierarchy import Node
from sparsync.units import is_finite, local_of, unflatten
from sparsync.updates.fragments import Begin, Weights
from sparsync.updates.moments import GradientNoise

__all__ = ["ModelWeights", "trained_of"]

_SAMPLES: Final = "(samples of gradients)"  # parentheses: no buffer has this name


def trained_of(module: nn.Module, ignored: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Return the parameters whose updates are exchanged, by name.

    Raises:
        ConfigurationError: one is complex, or has no values yet.
    """
    trained = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise ConfigurationError(
                f"'{name}' is {parameter.dtype}; make a parameter of its torch.view_as_real"
            )
        if parameter.device.type == "meta" or isinstance(parameter, nn.UninitializedParameter):
            raise ConfigurationError(
                f"'{name}' has no values yet; materialise the model (load it, or a first forward pass) "
                "before attach"
            )
    return trained


def _mark(buffer: Tensor) -> tuple[int, int]:
    """Return a value that changes when a buffer is written to or replaced."""
    return id(buffer), buffer._version


@final
class ModelWeights(Weights):
    """A model as one vector: its trained parameters, its floating-point buffers, samples of gradients.

    The vector is float64 if any of them is, else float32.  Inside a node, a rank reads only its own runs
    of the vector; to write, all ranks of the node call together and gather each other's runs.
    """

    cure = ""  # ``attach`` was given the optimizers

    def __init__(
        self,
        module: nn.Module,
        trained: Mapping[str, Tensor],
        buffers: bool,
        node: Node | None = None,
        noise: GradientNoise | None = None,
    ) -> None:
        self.noise = noise
        self._module, self.trained, self.node = module, dict(trained), node
        self._divisor = 1 if node is None else node.comm.world_size
        self.buffers = averaged_buffers(module) if buffers else []
        floating = {n: b for n, b in saved_buffers(module).items() if b.is_floating_point()}
        # Buffers that held NaN or Inf, presumably constants such as masks: exchanged, they would make
        # every exchange be refused.  ``strayed`` reports one that turns out to change.
        self._left_out = {
            n: _mark(b) for n, b in floating.items() if n not in self.buffers and buffers
        }
        self._sharded = any(hasattr(parameter, "to_local") for parameter in trained.values())
        tensors = self._tensors()
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.dtype = torch.float64 if wide else torch.float32
        self.ranks = 1.0  # the number of ranks over which noise is averaged away; see ``Weight``
        # a weak reference to the handle's method: the handle keeps these weights
        self.carrier: Callable[[], Callable[[Begin], Awaitable[None]] | None]

    def _tensors(self) -> list[Tensor]:
        """Return the tensors of which the vector consists, in order."""
        # looked up every time: a module may replace a buffer by another tensor
        buffers = dict(self._module.named_buffers()) if self.buffers else {}
        own = [local_of(t) for t in (*self.trained.values(), *(buffers[n] for n in self.buffers))]
        return own if self.noise is None else [*own, self.noise.values]

    @property
    def rest(self) -> dict[str, int]:
        """The sizes of buffers and samples, which follow the trained parameters."""
        tensors = self._tensors()[len(self.trained) :]
        named = zip((*self.buffers, _SAMPLES), tensors, strict=False)  # without noise no samples
        return {name: -(-t.numel() // self._divisor) for name, t in named if t.numel()}

    @property
    def exchanged(self) -> list[str]:
        """The names of the parameters and buffers in the vector."""
        return [*self.trained, *self.buffers]

    def reshard(self) -> None:
        """Let FSDP2 free whole parameters that an evaluation has left: these copies are now stale."""
        for owner in self._module.modules() if self._sharded else ():
            if hasattr(owner, "unshard"):
                owner.reshard()  # type: ignore[operator]

    def _within(self, span: slice) -> Iterator[tuple[Tensor, slice]]:
        """Yield the tensors of a span of whole tensors, and their places in it."""
        # inside a node, a tensor takes the length of one run, a part of its size rounded up
        first, last, end = span.start or 0, span.stop, 0
        for tensor in self._tensors():
            start, end = end, end - (-tensor.numel() // self._divisor)
            if start >= first and (last is None or end <= last) and tensor.numel():
                yield tensor, slice(start - first, end - first)

    @torch.no_grad()
    def read(self, span: slice, out: Tensor | None = None) -> Tensor:
        """Return a copy of a part, in ``out`` if that is given."""
        run_of = torch.flatten if self.node is None else self.node.run_of
        found = [run_of(tensor).to(self.dtype) for tensor, _ in self._within(span)]
        return torch.cat(found, out=out) if found else torch.zeros(0, dtype=self.dtype)

    def _pairs(self, span: slice, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of a span, and their values in a vector."""
        found = list(self._within(span))
        tensors = [tensor for tensor, _ in found]
        if self.node is None:
            return tensors, unflatten(values, tensors)
        # row r has rank r's runs of all tensors: a tensor is its columns, row by row, less the padding
        rows = self.node.gathered(values)
        pieces = [rows[:, at].flatten()[: tensor.numel()] for tensor, at in found]
        return tensors, [its.view(one.shape) for one, its in zip(tensors, pieces, strict=True)]

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average buffers inside the node, whose ranks see different batches."""
        # weights of a node's ranks are equal, by averaged gradients; a rank sends only its run of each
        # buffer, so these must be equal as well
        if self.node is not None:
            for buffer in self._tensors()[len(self.trained) :][: len(self.buffers)]:
                self.node.average_(buffer)
            self.node.check()

    @torch.no_grad()
    def write(self, span: slice, values: Tensor) -> None:
        """Replace a part, in the same tensors."""
        self.reshard()
        # a part without tensors is an empty list, which torch._foreach functions refuse
        if (pairs := self._pairs(span, values))[0]:
            torch._foreach_copy_(*pairs)

    @torch.no_grad()
    def add(self, span: slice, values: Tensor) -> None:
        """Add to a part, in the same tensors."""
        self.reshard()
        if (pairs := self._pairs(span, values))[0]:
            torch._foreach_add_(*pairs)

    def broken(self) -> str:
        """Name a parameter or buffer of this rank that is not finite; empty: there is none."""
        for name, tensor in zip(self.exchanged, self._tensors(), strict=False):
            if not is_finite(tensor):
                left_out = " (persistent=False would leave it out)" if name in self.buffers else ""
                return f"'{name}'{left_out}"
        return ""

    def strayed(self) -> str:
        """Name a buffer that was left out because it held NaN or Inf, and is finite now; empty: none.

        Each is named once.  Cost: a pass over the left-out buffers that were written to.
        """
        now = dict(self._module.named_buffers()) if self._left_out else {}
        for name, mark in list(self._left_out.items()):
            if name in now and (written := _mark(now[name])) != mark:
                self._left_out[name] = written
                if bool(torch.isfinite(now[name]).all()):
                    del self._left_out[name]
                    return name
        return ""

    def landed(self, span: slice, shared: Tensor) -> None:
        """Take in the averages of gradients' samples, which are the end of the vector.

        They are read from the ``shared`` vector: a late exchange is added to a rank's own vector, which
        rounds differently on each rank, and shares must be equal on all.
        """
        # only the last fragment has the samples
        if self.noise is not None and any(t is self.noise.values for t, _ in self._within(span)):
            values = self.noise.values
            # inside a node ``shared`` has only this rank's runs; ``write`` has gathered them
            if self.node is None:
                values.copy_(shared[shared.numel() - values.numel() :].view_as(values))
            self.noise.measure()

    def carry(self, exchange: Begin) -> Awaitable[None]:
        """Begin an exchange on the engine's thread."""
        carry = self.carrier()
        assert carry is not None
        return carry(exchange)
