"""Split a model's vector into fragments; hold the exchange of a fragment while it is in flight."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import NonFiniteGradientError
from sparsync.transports.driver import Operation
from sparsync.units import Unit, is_finite, local_of, plan_units

__all__ = ["Begin", "Exchange", "Fragment", "Layout", "Scratch", "Weights", "rotate_"]

_ROTATED: Final = 1 << 22  # elements that ``rotate_`` transforms at a time, to limit its memory

Begin = Callable[[], Coroutine[Operation, None, None]]


class Fragment(NamedTuple):
    """Consecutive parameters that are exchanged together."""

    span: slice  # their elements in the vector of all weights
    units: range  # numbers of the fragment's units; a unit belongs to only one fragment


class _Piece(NamedTuple):
    """Consecutive elements of a unit that are also consecutive in the vector."""

    unit: int  # the run's first element, counted within the unit
    vector: int  # the same element, counted within the vector
    size: int


@final
class Layout:
    """Splits the vector of parameters into fragments: runs of whole parameters, of about equal size.

    The ``rest`` of the vector, i.e. buffers and moments, belongs to the last fragment.

    Attributes:
        end: the index at which the parameters end in the vector and the rest begins.
        fragments: the fragments, with their places in the vector and their units.
        units: the units of all fragments.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], rest: Mapping[str, int], count: int
    ) -> None:
        # consecutive parameters of one dtype, joined into one slice of the vector
        self._narrow: list[tuple[torch.dtype, slice]] = []
        self._shapes = {name: local_of(parameter).shape for name, parameter in parameters.items()}
        self._spans, self.end = dict[str, slice](), 0
        self._pieces: list[list[_Piece]] = []  # by unit, in order
        # pieces of all units, in the order of the vector, with the numbers of their units
        self._placed: list[tuple[_Piece, int]] = []
        for name, shape in self._shapes.items():
            start, self.end = self.end, self.end + shape.numel()
            self._spans[name], dtype = slice(start, self.end), parameters[name].dtype
            if self._narrow and self._narrow[-1][0] == dtype:
                start = self._narrow.pop()[1].start
            self._narrow.append((dtype, slice(start, self.end)))
        start = self.end
        for name, size in rest.items():
            self._spans[name] = slice(start, start + size)
            start += size
        self.fragments: list[Fragment] = []
        self.units: list[Unit] = []
        # Ends are computed from the sizes of whole parameters, not of shards, so that all parts of
        # a replica have the same fragments and exchange them at the same time.  A parameter
        # belongs to the fragment that contains its middle.  All sizes are doubled to keep middles
        # whole numbers, which are equal on all ranks.
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
        """Plan the units of all fragments; see ``plan_units``.

        Parameters of different ``kinds`` get different units.  If several ranks of a replica hold a
        parameter, all of them must round it the same way, although each may hold different neighbours.
        """
        # Middles ascend from parameter to parameter, so the parameters of a fragment are contiguous.  A
        # fragment that contains no middle is dropped, so there may be fewer fragments than requested.
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
        self._arrange()

    def extents(self) -> dict[str, Any]:
        """Return the sizes of parameters, in order, and the bounds of fragments, as plain numbers."""
        sizes = {name: span.stop - span.start for name, span in self._spans.items()}
        spans = [[fragment.span.start, fragment.span.stop] for fragment in self.fragments]
        return {"layout": sizes, "spans": spans}

    def _arrange(self) -> None:
        """Record where the pieces of units lie in the vector."""
        self._pieces = []
        for unit in self.units:
            pieces: list[_Piece] = []
            for slot in unit.slots:
                start = self._spans[slot.name].start
                last = pieces[-1] if pieces else None
                if last is not None and last.vector + last.size == start:
                    pieces[-1] = last._replace(size=last.size + slot.size)
                else:
                    pieces.append(_Piece(slot.start, start, slot.size))
            self._pieces.append(pieces)
        placed = [(piece, unit) for unit, its in enumerate(self._pieces) for piece in its]
        self._placed = sorted(placed, key=lambda pair: pair[0].vector)

    def units_at(self, place: slice) -> Iterator[tuple[int, slice, slice]]:
        """Yield each unit in a part of the vector: number, elements, and their position in this part."""
        first = bisect_right(self._placed, place.start, key=lambda pair: pair[0].vector) - 1
        for piece, unit in self._placed[max(first, 0) :]:
            low, high = max(piece.vector, place.start), min(piece.vector + piece.size, place.stop)
            if low < high:
                shift = piece.unit - piece.vector
                here = slice(low - place.start, high - place.start)
                yield unit, slice(low + shift, high + shift), here
            elif piece.vector >= place.stop:
                return

    def places(self, unit: int, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
        """Yield the runs of the vector that hold elements ``[start, stop)`` of a unit.

        Each run comes with the position of its elements, relative to ``start``.
        """
        pieces = self._pieces[unit]
        first = bisect_right(pieces, start, key=lambda piece: piece.unit) - 1
        for piece in pieces[max(first, 0) :]:
            low, high = max(piece.unit, start), min(piece.unit + piece.size, stop)
            if low >= high:
                return
            shift = piece.vector - piece.unit
            yield slice(low + shift, high + shift), slice(low - start, high - start)

    def dtypes(self, place: slice) -> Iterator[tuple[slice, torch.dtype | None]]:
        """Split a part of the vector by dtype; yield each piece with the dtype of its parameters.

        The dtype is None for buffers and moments, which are not rounded.
        """
        at = place.start
        for dtype, span in self._narrow:
            low, high = max(span.start, place.start), min(span.stop, place.stop)
            if low < high:
                yield slice(low, high), dtype
                at = high
        if at < place.stop:
            yield slice(at, place.stop), None

    def rounded(self, place: slice, values: Tensor) -> Tensor:
        """Round a part of the vector, in place, to the dtypes of its parameters."""
        for part, dtype in self.dtypes(place):
            if dtype not in (None, values.dtype):
                here = values[part.start - place.start : part.stop - place.start]
                here.copy_(here.to(dtype))
        return values


@dataclass(eq=False)
class Exchange:
    """The exchange of a fragment, while in flight.

    Attributes:
        part: the number of the fragment.
        lands: the local step after which the exchange is applied.
        late: whether local steps continue during the exchange.
        weights: for a late exchange, first this rank's weights at its start, later the change to add to
            this rank's weights.
        shared: the new shared weights of a late exchange.
        lr: the learning rate of a step by signs.
        drift: the measured drift, with an ``AdaptivePeriod``.
        scratch: `[3, size or more]`, memory for these vectors and for whole updates, reused by a later
            exchange; None until it is needed.
        done: whether the exchange has ended.
        refused: whether the sum contained NaN or Inf.
        last: whether the exchange delivers everything that is left.
        seen: this rank's count for the exchange; see ``Contributions``.
        weight, ranks: see ``Weight``.
        carried: an awaitable of the exchange's end, to be awaited once.
    """

    part: int
    lands: int
    late: bool
    weights: Tensor | None = None
    shared: Tensor | None = None
    done: bool = False
    refused: bool = False
    carried: Awaitable[None] | None = None
    scratch: Tensor | None = None
    lr: float = 1.0
    drift: float = 0.0
    last: bool = False
    seen: float = 0.0
    weight: float = 1.0
    ranks: float = 1.0

    def replace(self) -> None:
        """Replace this rank's weights with the new shared weights, instead of adding the change."""
        self.late, self.weights = False, None

    def carry(self, carried: Awaitable[None] | None) -> Awaitable[None] | None:
        """Set ``carried``, the awaitable of the exchange's end or None; return its previous value."""
        before, self.carried = self.carried, carried
        return before

    def weigh(self, weight: float, ranks: float) -> None:
        """Set the weight of this rank's update, before it is exchanged."""
        self.weight, self.ranks = weight, ranks

    def hold(self, scratch: Tensor) -> None:
        """Hold scratch memory until the exchange is applied."""
        self.scratch = scratch

    def begin_with(self, weights: Tensor) -> None:
        """Set this rank's weights at the start of a late exchange."""
        self.weights = weights

    def step_to(self, shared: Tensor) -> None:
        """Set the memory that holds the new shared weights until the exchange is applied."""
        self.shared = shared

    def end(self, change: Tensor | None, drift: float) -> None:
        """End the exchange; a late exchange will add ``change`` to this rank's weights when applied."""
        self.weights, self.drift, self.done = change, drift, True

    def refuse(self) -> None:
        """End the exchange without a result."""
        self.done = self.refused = True

    def state_dict(self) -> dict[str, Any]:
        """Return the fields that are needed to apply the exchange after a load."""
        # States are saved when all exchanges have ended, so no awaitable is left. Scratch memory is not
        # worth saving.
        passing = ("carried", "scratch", "last")
        kept = {name: value for name, value in vars(self).items() if name not in passing}
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()}


@final
class Scratch:
    """Keeps the memory of exchanges that were applied, so that later exchanges can reuse it.

    Only CPU memory is kept.  The operating system clears a fresh page on first touch, which takes longer
    than all the work done with it here.  A row that is never touched takes no memory.  (GPU memory is
    already cached by torch's allocator.)
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor, size: int) -> Tensor:
        """Return three rows of scratch memory."""
        return self._free.pop() if self._free else like.new_empty(3, size)

    def keep(self, scratch: Tensor | None) -> None:
        """Keep the memory of an exchange for reuse, if it had any."""
        if scratch is not None and scratch.is_cpu:
            self._free.append(scratch)


def rotate_(flat: Tensor, chunk: int | None, back: bool = False) -> Tensor:
    """Replace each run of ``chunk`` elements with its orthonormal DCT-II; with ``back``, undo this.

    The last run may be shorter.  Norms are preserved, and the transform of a sum over ranks is the sum of
    the transforms.  If ``chunk`` is None, nothing changes.

    Cost: ``2 n chunk`` operations; 16 MB of memory, and 64 MB on CUDA.

    Example:
        >>> rotate_(torch.ones(6), 4).abs().gt(1e-6).tolist()
        [True, False, False, False, True, False]
    """
    whole = flat.numel() // (chunk or 1) * (chunk or 1)
    for part, size in ((flat[:whole], chunk), (flat[whole:], flat.numel() - whole)):
        if size and part.numel():
            # basis[i, j] = sqrt(2 / N) cos(pi / N * i * (j + 1/2)), with the first row divided by
            # sqrt(2), which makes the inverse equal to the transpose.  It is computed in float64, so
            # that the cosines of different machines round to the same numbers.
            at = torch.arange(size, dtype=torch.float64, device=flat.device)
            basis = torch.cos(math.pi / size * at[:, None] * (at + 0.5)).mul_(math.sqrt(2 / size))
            basis[0] /= math.sqrt(2)
            basis = basis.T if not back else basis
            for rows in torch.split(part.view(-1, size), max(_ROTATED // size, 1)):
                # CUDA may multiply float32 in TF32, as torch's global settings say.  The error of 4e-4
                # would then be in no residual, so it would be lost.
                wide = rows.double() if rows.is_cuda else rows
                rows.copy_(wide @ basis.to(wide.dtype))
    return flat


class Weights:
    """Weights as a vector that is read and written in parts.

    This class wraps a tensor, and copies it before the first write.  ``ModelWeights`` overrides all of
    its methods.

    Attributes:
        cure: advice, which is appended to the error after NaN or Inf was exchanged twice.
    """

    cure = "; give optimizer= if you have not: then its broken moments are dropped"

    def __init__(self, vector: Tensor | None = None) -> None:
        self.hold(torch.zeros(0, device="cpu") if vector is None else vector)

    def hold(self, vector: Tensor) -> None:
        """From now on, wrap this vector."""
        self.vector, self._own = vector, False

    def read(self, place: slice) -> Tensor:
        """Return a copy of a part of the vector."""
        return self.vector[place].clone()

    def pieces(self, place: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """Yield the tensors that form a part of the vector, each after its position; None means zeros."""
        yield slice(0, place.stop - place.start), self.vector[place]

    def write(self, place: slice, values: Tensor, *, add: bool = False) -> None:
        """Replace a part of the vector, or add to it."""
        if not self._own:
            self.vector, self._own = self.vector.clone(), True
        self.vector[place] = self.vector[place] + values if add else values

    def reshard(self) -> None:
        """Prepare for a write."""

    def finite(self) -> bool:
        """Return whether all elements are finite."""
        return is_finite(self.vector)

    def broken(self) -> str:
        """Return the name of a tensor of this rank that is not finite, or "" if none is known."""
        return ""

    def refused(self, step: int | None) -> NonFiniteGradientError:
        """Return the error for a second exchange in a row that contained NaN or Inf."""
        name = self.broken()
        here = f", here in {name}" if name else ""
        return NonFiniteGradientError(
            f"local step {step}: a second exchange in a row holds NaN or Inf{here}; load a checkpoint, "
            f"and look for the cause in the loss and gradients since the last exchange{self.cure}"
        )

    def landed(self, span: slice, shared: Tensor) -> None:
        """Record that the exchange of a part of the vector was applied."""
