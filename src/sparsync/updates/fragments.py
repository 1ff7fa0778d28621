"""Divide a model's vector into fragments, and keep the exchanges of them that are under way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import NonFiniteGradientError
from sparsync.transports.driver import Operation
from sparsync.units import Slot, Unit, local_of, plan_units

__all__ = ["Begin", "Exchange", "Fragment", "Layout", "Rooms", "Weights", "rotate_"]

Begin = Callable[[], Coroutine[Operation, None, None]]


class Fragment(NamedTuple):
    """A run of parameters."""

    span: slice  # of the vector
    units: range


@final
class Layout:
    """Divides the vector of parameters into fragments: runs of whole parameters of about equal size.

    The ``rest`` of the vector, buffers and moments, belongs to the last fragment.

    Attributes:
        end: of the parameters.
        fragments: with their places in the vector, and their units.
        units: of all fragments.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], rest: Mapping[str, int], count: int
    ) -> None:
        self._dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        self._shapes = {name: local_of(parameter).shape for name, parameter in parameters.items()}
        self._spans, self.end = dict[str, slice](), 0
        for name, shape in self._shapes.items():
            start, self.end = self.end, self.end + shape.numel()
            self._spans[name] = slice(start, self.end)
        start = self.end
        for name, size in rest.items():
            self._spans[name] = slice(start, start + size)
            start += size
        self.fragments: list[Fragment] = []
        self.units: list[Unit] = []
        # of whole parameters, not of shards: all parts of a replica divide alike
        ends = list(itertools.accumulate(p.numel() for p in parameters.values()))
        total = 2 * max(ends[-1] if ends else 0, 1)
        middles = [2 * e - p.numel() for e, p in zip(ends, parameters.values(), strict=True)]
        self._number = dict.fromkeys(rest, count - 1) | {
            name: min(middle * count // total, count - 1)
            for name, middle in zip(parameters, middles, strict=True)
        }

    def plan(
        self,
        vector: Tensor,
        unit_bytes: int | None,
        compress: Callable[[str, Tensor], bool],
        output: Collection[str],
        kinds: Mapping[str, str],
    ) -> None:
        """Plan the units of all fragments, see ``plan_units``.

        Parameters of different ``kinds`` have different units: those that other ranks hold as well must
        be rounded alike there, whatever else a unit holds.
        """
        for _, group in itertools.groupby(self._spans, self._number.__getitem__):
            names, first = list(group), len(self.units)
            for kind in dict.fromkeys(kinds.get(name) for name in names):
                views = [
                    (name, vector[self._spans[name]].view(self._shapes.get(name, (-1,))))
                    for name in names
                    if kinds.get(name) == kind
                ]
                self.units += plan_units(views, unit_bytes, compress, output)
            span = slice(self._spans[names[0]].start, self._spans[names[-1]].stop)
            self.fragments.append(Fragment(span, range(first, len(self.units))))

    def extents(self) -> dict[str, Any]:
        """Return the sizes of parameters, in order, and where fragments end, as plain numbers."""
        sizes = {name: span.stop - span.start for name, span in self._spans.items()}
        spans = [[fragment.span.start, fragment.span.stop] for fragment in self.fragments]
        return {"layout": sizes, "spans": spans}

    def _place(self, fragment: Fragment, name: str) -> slice:
        """Return where a parameter lies in its fragment."""
        span, first = self._spans[name], fragment.span.start
        return slice(span.start - first, span.stop - first)

    def _slots(self, part: int) -> list[tuple[Slot, ...]]:
        return [self.units[unit].slots for unit in self.fragments[part].units]

    def by_units(self, part: int, whole: Tensor) -> list[Tensor]:
        """Return the units' parts of a fragment; of a single unit that is all of it."""
        fragment = self.fragments[part]
        if len(fragment.units) == 1:
            return [whole]
        return [
            torch.cat([whole[self._place(fragment, slot.name)] for slot in slots])
            for slots in self._slots(part)
        ]

    def joined(self, part: int, flats: Sequence[Tensor]) -> Tensor:
        """Return the fragment whose parts the units hold."""
        fragment = self.fragments[part]
        if len(flats) == 1:
            return flats[0]
        whole = flats[0].new_empty(fragment.span.stop - fragment.span.start)
        for slots, flat in zip(self._slots(part), flats, strict=True):
            for slot, values in zip(slots, torch.split(flat, [s.size for s in slots]), strict=True):
                whole[self._place(fragment, slot.name)] = values
        return whole

    def rounded(self, part: int, whole: Tensor) -> Tensor:
        """Round a fragment in place to what its parameters can hold."""
        fragment = self.fragments[part]
        for slot in (slot for slots in self._slots(part) for slot in slots):
            dtype = self._dtypes.get(slot.name, whole.dtype)
            if dtype != whole.dtype:
                here = whole[self._place(fragment, slot.name)]
                here.copy_(here.to(dtype))
        return whole


@dataclass(eq=False)
class Exchange:
    """The exchange of a fragment, under way.

    Attributes:
        lands: the local step after which it is applied.
        late: other local steps are done meanwhile.
        weights: those at its begin; then the new ones, or, if it is late, what is added to them.
        shared: the new shared weights.
        lr: size of a step by signs.
        drift: how far ranks had gone, with an ``AdaptivePeriod``.
        room: `[3, size or more]` for these vectors, which another exchange has afterwards.
        done: nothing is under way any more.
        refused: NaN or Inf was in the sum.
        last: it delivers all that is left.
        seen: what this rank has counted for it; see ``Contributions`` and ``Weight``.
        carried: the exchange to await, once.
    """

    part: int
    lands: int
    late: bool
    weights: Tensor
    shared: Tensor | None = None
    done: bool = False
    refused: bool = False
    carried: Awaitable[None] | None = None
    room: Tensor | None = None
    lr: float = 1.0
    drift: float = 0.0
    last: bool = False
    seen: float = 0.0
    weight: float = 1.0
    ranks: float = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return what is left to do."""
        passing = ("carried", "room", "last")  # settled, and of no use later
        kept = {name: value for name, value in vars(self).items() if name not in passing}
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()}


@final
class Rooms:
    """Memory of exchanges that have landed, for others.

    It is kept where memory is that of the system: pages that are touched for the first time cost more
    than all that is done with them here.  A row that is not used takes none.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor, size: int) -> Tensor:
        """Return three rows."""
        return self._free.pop() if self._free else like.new_empty(3, size)

    def keep(self, room: Tensor | None) -> None:
        """Keep what an exchange has had."""
        if room is not None and room.is_cpu:
            self._free.append(room)


def rotate_(flat: Tensor, chunk: int | None, back: bool = False) -> Tensor:
    """Replace every ``chunk`` elements, and the shorter rest, by their orthonormal DCT-II, or go back.

    Norms and sums over ranks are those of the elements.  Cost: 2 n chunk operations; None: none.

    Example:
        >>> rotate_(torch.ones(6), 4).abs().gt(1e-6).tolist()
        [True, False, False, False, True, False]
    """
    whole = flat.numel() // (chunk or 1) * (chunk or 1)
    for part, size in ((flat[:whole], chunk), (flat[whole:], flat.numel() - whole)):
        if size and part.numel():
            at = torch.arange(size, dtype=torch.float64, device=flat.device)
            basis = torch.cos(math.pi / size * at[:, None] * (at + 0.5)).mul_(math.sqrt(2 / size))
            basis[0] /= math.sqrt(2)
            basis = basis.to(flat.dtype)
            part.copy_((part.view(-1, size) @ (basis if back else basis.T)).flatten())
    return flat


class Weights:
    """Weights as a vector, of which fragments are read and written.

    This one is a tensor that is copied when it is written to; a model overrides all of it.

    Attributes:
        cure: what else helps where NaN or Inf was exchanged twice.
    """

    cure = "; give optimizer= if you have not: then its broken moments are dropped"

    def __init__(self, vector: Tensor | None = None) -> None:
        self.hold(torch.zeros(0) if vector is None else vector)

    def hold(self, vector: Tensor) -> None:
        """Be this vector from now on."""
        self.vector, self._own = vector, False

    def read(self, span: slice, out: Tensor | None = None) -> Tensor:
        """Return a copy of a part, in ``out`` if that is given."""
        return self.vector[span].clone() if out is None else out.copy_(self.vector[span])

    def write(self, span: slice, values: Tensor) -> None:
        """Replace a part."""
        if not self._own:
            self.vector, self._own = self.vector.clone(), True
        self.vector[span] = values

    def add(self, span: slice, values: Tensor) -> None:
        """Add to a part."""
        self.write(span, self.vector[span] + values)

    def broken(self) -> str:
        """Name what of this rank's weights is not finite, if that is known."""
        return ""

    def refused(self, step: int | None) -> NonFiniteGradientError:
        """Return the error of a second exchange in a row that held NaN or Inf."""
        name = self.broken()
        here = f", here in {name}" if name else ""
        return NonFiniteGradientError(
            f"local step {step}: a second exchange in a row holds NaN or Inf{here}; load a checkpoint, "
            f"and look for the cause in the loss and gradients since the last exchange{self.cure}"
        )

    def landed(self, span: slice, shared: Tensor) -> None:
        """Take note that an exchange of a part was applied."""
