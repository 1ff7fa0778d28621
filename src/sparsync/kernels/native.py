"""The hot loops in C++ (``native/``), for float32 on the CPU; ``reference.py`` describes them.

The extension is built when the package is installed, if there is a C++ compiler.  The instruction set is
chosen at run time: AVX-512, AVX2, NEON, or plain C++.  The environment variable ``SPARSYNC_KERNELS``
overrides the choice; the value ``torch`` disables this module.  Passes over large vectors use up to
``torch.get_num_threads()`` threads.

Tensors are passed as addresses.  This module or the C++ code refuses arguments that would cause
accesses out of bounds.  The functions for messages are the fused passes of ``wire/packed.py`` and
``wire/messages.py``.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels.keys import check_pair
from sparsync.kernels.reference import Dealt

__all__ = [
    "EXTENSION",
    "Codes",
    "accumulate_",
    "chosen",
    "count_from",
    "cut_messages",
    "deal",
    "deal_and_pack",
    "decode_levels_",
    "empty",
    "find",
    "fold_messages",
    "instruction_sets",
    "join_messages",
    "lengthen_",
    "lengthen_rows_",
    "merge",
    "quantise",
    "restrict",
    "scatter_",
    "subtract_",
    "sum_codes_",
    "top",
    "undeal",
    "unpack_and_sum",
    "unpack_and_undeal",
]

# The version of the extension's functions.  It must equal the version in native/module.cpp, because an
# extension built from older sources might mistake lengths for addresses.
_INTERFACE: Final = 10


def _load() -> Any:
    try:
        extension = importlib.import_module("sparsync.kernels._native")
    except ImportError:  # not built, or built for another machine
        return None
    if getattr(extension, "interface", 1) != _INTERFACE:
        raise ConfigurationError(
            f"the native kernels in {extension.__file__} were built from other sources than this "
            "sparsync: install it again (in a checkout: make)"
        )
    return extension


EXTENSION: Final[Any] = _load()  # the extension module, or None

# elements per additional thread: a pass over them takes 200 us, and starting a thread takes 50 us
_ELEMENTS_PER_THREAD: Final = 1 << 20
# up to this size, ``find`` without a limit allocates memory for all elements instead of counting first
_SMALL: Final = 1 << 14
# from this size on, ``top`` guesses a threshold from a sample instead of counting all keys
_SAMPLED: Final = 1 << 17
_STRIDE: Final = 256  # largest distance between sampled elements
_SAMPLES: Final = 1 << 12  # smallest number of samples
# the smallest number of bytes per entry in a message, by the form of its values
_ENTRY_BYTES: Final = (8, 2, 1, 4)


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that this build and this machine support, fastest first."""
    return tuple(EXTENSION.instruction_sets()) if EXTENSION is not None else ()


@functools.cache
def chosen() -> str:
    """Return the name of the instruction set in use; ``torch`` if this module is not used.

    Raises:
        ConfigurationError: ``SPARSYNC_KERNELS`` names an instruction set that is not available.
    """
    available = (*instruction_sets(), "torch")
    wanted = os.environ.get("SPARSYNC_KERNELS") or available[0]
    if wanted not in available:
        raise ConfigurationError(
            f"SPARSYNC_KERNELS is {wanted!r}; this installation on this machine has "
            f"{', '.join(available)}: name one of them or unset it"
        )
    return wanted


# ---- single vectors ---------------------------------------------------------------------------------


def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> tuple[Tensor, Tensor] | None:
    """Swap and add in C++.  Cost: one pass that reads and writes both vectors."""
    check_pair(residual, gradient)
    pair, n = (_address("residual", residual), _address("gradient", gradient)), residual.numel()
    if key is None:
        EXTENSION.swap_add(*pair, n, _workers(n), chosen())
        return None
    return _collect(EXTENSION.accumulate, (*pair, n), key, limit)


def find(x: Tensor, key: int, limit: int | None) -> tuple[Tensor, Tensor] | None:
    """Find entries in C++.  Cost: one pass over x; without a limit, a second pass."""
    n = x.numel()
    searched = _address("x", x), n
    if limit is None:
        # for few elements, allocating room for all of them is cheaper than a second pass
        few = n <= _SMALL
        limit = n if few else EXTENSION.count(*searched, _low(key), _workers(n), chosen())
    return _collect(EXTENSION.find, searched, key, limit)


def _collect(
    kernel: Callable[..., int], vectors: tuple[int, ...], key: int, limit: int
) -> tuple[Tensor, Tensor] | None:
    n = vectors[-1]
    # every thread gets room for ``limit`` entries, because memory costs nothing until it is written; C++
    # then joins the threads' results
    limit, workers = max(min(limit, n), 0), _workers(n)
    indices, values = empty(workers * limit, torch.int64), empty(workers * limit, torch.float32)
    ends = indices.data_ptr(), values.data_ptr()
    count = kernel(*vectors, _low(key), limit, *ends, workers, chosen())
    return None if count < 0 else (indices[:count], values[:count])


def _workers(n: int) -> int:
    return max(1, min(torch.get_num_threads(), n // _ELEMENTS_PER_THREAD))


def _low(key: int) -> int:
    """Return the key clamped to 1 .. 2^31; with 0, zeros would be selected."""
    return min(max(key, 1), 1 << 31)


def top(x: Tensor, k: int) -> Tensor:
    """Select in C++.  Cost for large x: one pass and a selection among about k; at worst six passes."""
    n, address = x.numel(), _address("x", x)
    k = min(k, n)
    if k <= 0:
        return empty(0, torch.int64)
    if n >= _SAMPLED and 4 * k <= n:
        # The guess affects only the cost: if there are at least k candidates, the top k are among them.
        # If there are fewer, or far too many, all keys are counted.
        key = EXTENSION.guess(address, n, k, min(_STRIDE, n // _SAMPLES))
        candidates = find(x, key, 4 * k + _SMALL)
        if candidates is not None and candidates[0].numel() >= k:
            return candidates[0][top(candidates[1], k)]
    positions = empty(k, torch.int64)
    return positions[: EXTENSION.top(address, n, k, positions.data_ptr(), chosen())]


def count_from(values: Tensor, keys: Tensor) -> Tensor:
    keys = keys.to(torch.int64).contiguous()
    counts = torch.empty_like(keys)
    searched = _address("values", values), values.numel()
    wanted = _address("keys", keys, torch.int64), keys.numel()
    _guarded(EXTENSION.count_from, *searched, *wanted, counts.data_ptr(), chosen())
    return counts


# ---- indices and values -----------------------------------------------------------------------------


def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    parts = [_entries(indices, values) for indices, values in streams]
    room = sum(count for _, _, count in parts)
    indices, values = empty(room, torch.int64), empty(room, torch.float32)
    ends = indices.data_ptr(), values.data_ptr(), chosen()
    if within is None:
        count = _guarded(EXTENSION.merge, parts, size, *ends)
    else:
        places = _address("within", within, torch.int64), within.numel()
        count = _guarded(EXTENSION.merge_within, parts, size, *places, *ends)
    return indices[:count], values[:count]


def restrict(indices: Tensor, among: Tensor) -> Tensor:
    positions = torch.empty_like(indices)
    searched = _address("indices", indices, torch.int64), indices.numel()
    wanted = _address("among", among, torch.int64), among.numel()
    return positions[: _guarded(EXTENSION.restrict_to, *searched, *wanted, positions.data_ptr())]


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    written = _address("dense", dense), dense.numel()
    _guarded(EXTENSION.subtract, *written, *_entries(indices, values))
    return dense


def scatter_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    n = dense.numel()
    written = _address("dense", dense), n
    _guarded(EXTENSION.scatter, *written, *_entries(indices, values), _workers(n))
    return dense


def deal(indices: Tensor, world_size: int) -> Dealt:
    order, local = torch.empty_like(indices), torch.empty_like(indices)
    counts = empty(world_size, torch.int64)
    dealt = _address("indices", indices, torch.int64), indices.numel()
    EXTENSION.deal(*dealt, world_size, order.data_ptr(), local.data_ptr(), counts.data_ptr())
    return Dealt(order, local, counts.tolist())


def undeal(local: Tensor, owner: int, world_size: int) -> Tensor:
    indices, dealt = torch.empty_like(local), _address("local", local, torch.int64)
    EXTENSION.undeal(dealt, local.numel(), owner, world_size, indices.data_ptr())
    return indices


# ---- levels -----------------------------------------------------------------------------------------


# the fields are: bits, block (a multiple of 8), the largest scale, thresholds, levels
Levels = tuple[int, int, float, Tensor, Tensor]


def quantise(values: Tensor, levels: Levels) -> Tensor:
    """Return the bytes of scales and codes.  Cost: one pass."""
    n = values.numel()
    middle, end = _level_bytes(n, levels)
    raw = empty(end, torch.uint8)
    Codes(raw[:middle], raw[middle:], n, levels).write_(values, 0)
    return raw


def decode_levels_(
    into: Tensor, raw: Tensor, levels: Levels, divisor: float, *, keep: bool
) -> None:
    """Decode, divide, and write to ``into`` or, with ``keep``, add to it.  Cost: one pass."""
    middle = _level_bytes(into.numel(), levels)[0]
    Codes(raw[:middle], raw[middle:], into.numel(), levels).decode_(into, 0, divisor, keep=keep)


@final
class Codes:
    """The scales and codes of ``size`` values, which are written and read in runs.

    All arguments are checked only once, because a check takes as long as processing ten thousand codes.
    """

    def __init__(self, scales: Tensor, codes: Tensor, size: int, levels: Levels) -> None:
        middle, end = _level_bytes(size, levels)
        if scales.numel() != middle or codes.numel() != end - middle:
            raise ConfigurationError(
                f"{scales.numel()} bytes of scales and {codes.numel()} of codes are not those of "
                f"{size} values"
            )
        self._kept = scales, codes, levels  # these tensors own the memory
        self._size, self._block, self._bits = size, levels[1], levels[0]
        self._scales = _address("scales", scales, torch.uint8)
        self._codes = _address("codes", codes, torch.uint8)
        tables = _address("thresholds", levels[3]), _address("levels", levels[4])
        self.table = (*levels[:3], *tables)

    def write_(self, values: Tensor, start: int, more: Tensor | None = None) -> None:
        """Quantise ``values``, or their sum with ``more``, into the elements from ``start`` on."""
        n = values.numel()
        if more is not None and more.numel() != n:
            raise ConfigurationError(f"{more.numel()} values to be added to {n}")
        given = _address("values", values), 0 if more is None else _address("more", more)
        places = *self.places(start, n), _workers(8 * n), chosen()
        EXTENSION.quantise(*given, n, self.table, *places)

    def decode_(
        self,
        into: Tensor,
        start: int,
        divisor: float,
        *,
        keep: bool,
        plus: Tensor | None = None,
        less: Sequence[Codes] = (),
    ) -> None:
        """Decode elements from ``start`` on, subtract ``less``, divide, and write or add the result."""
        n = into.numel()
        if plus is not None and plus.numel() != n:
            raise ConfigurationError(f"{plus.numel()} values to be added to {n}")
        others = [other.places(start, n) for other in less]
        more = 0 if plus is None else _address("plus", plus)
        places = *self.places(start, n), _workers(8 * n * (1 + len(less))), chosen()
        result = _address("into", into), more, others, divisor, keep
        EXTENSION.decode_levels(*result, n, self.table, *places)

    def places(self, start: int, n: int) -> tuple[int, int]:
        """Return the addresses of the scales and the codes of ``n`` elements from ``start`` on."""
        stop = start + n
        whole = start % self._block == 0 and (n % self._block == 0 or stop == self._size)
        if not (0 <= start <= stop <= self._size and whole):
            raise ConfigurationError(
                f"elements {start} to {stop} are not whole blocks of {self._block} of {self._size} "
                "values"
            )
        return self._scales + 2 * (start // self._block), self._codes + start * self._bits // 8


def sum_codes_(into: Tensor, messages: Sequence[Codes], start: int, own: Tensor | None) -> None:
    """Write the sum of several messages' runs, plus ``own``, in one pass; sums stay in the cache."""
    n = into.numel()
    if own is not None and own.numel() != n:
        raise ConfigurationError(f"{own.numel()} values for a sum of {n}")
    places = [message.places(start, n) for message in messages]
    mine = 0 if own is None else _address("own", own)
    given = n, messages[0].table, _workers(8 * n * len(messages)), chosen()
    EXTENSION.sum_levels(_address("into", into), places, mine, *given)


def _level_bytes(n: int, levels: Levels) -> tuple[int, int]:
    """Return the number of bytes of the scales, and the number of bytes of scales and codes."""
    scales = 2 * -(-n // levels[1])
    return scales, scales - -n * levels[0] // 8


# ---- Adam's moments ---------------------------------------------------------------------------------

# the fields are: the factor of the second moment in the desired step, its factor in the step that was
# made, eps, and the learning rate
Moments = tuple[float, float, float, float]


def lengthen_(first: Tensor, second: Tensor, weights: Tensor, moments: Moments) -> None:
    """Correct Adam's steps in C++.  Cost: one pass that reads three vectors and writes one."""
    n = weights.numel()
    if first.numel() != n or second.numel() != n:
        raise ConfigurationError(
            f"moments of {first.numel()} and {second.numel()} elements for a vector of {n}"
        )
    addresses = _address("first", first), _address("second", second), _address("weights", weights)
    EXTENSION.lengthen(*addresses, n, moments, _workers(4 * n), chosen())


def lengthen_rows_(
    first: Tensor, second: Tensor, weights: Tensor, factors: Tensor, moments: Moments
) -> None:
    """Do the same as ``lengthen_``, but with a desired factor per row instead of ``moments[0]``."""
    n, rows = weights.numel(), len(weights)
    if not first.numel() == second.numel() == n or factors.numel() != rows:
        raise ConfigurationError(
            f"moments of {first.numel()} and {second.numel()} elements and {factors.numel()} factors "
            f"for {rows} rows of {n} elements"
        )
    addresses = _address("first", first), _address("second", second), _address("weights", weights)
    sizes = _address("factors", factors), rows, n // max(rows, 1)
    EXTENSION.lengthen_rows(*addresses, *sizes, moments, _workers(4 * n), chosen())


# ---- exchanges of packed messages -------------------------------------------------------------------


# the fields are: the header with a count of 0, as two integers; the values' form and block; the number of
# elements per owner
Style = tuple[int, int, int, int, int]


def deal_and_pack(
    indices: Tensor,
    values: Tensor,
    world_size: int,
    rank: int,
    limit: int,
    style: Style,
    stride: int,
) -> tuple[list[Tensor], Tensor, tuple[Tensor, Tensor]] | None:
    """Deal entries to owners; pack a message of at most ``stride`` bytes for every owner except ``rank``.

    Return a message per owner (empty for ``rank``), the values that the owners will see, and the rank's
    own entries; return None if a share has more than ``limit`` entries.
    """
    nnz = values.numel()
    messages, lengths = empty(world_size * stride, torch.uint8), empty(world_size, torch.int64)
    arriving, own_values = empty(nnz, torch.float32), empty(nnz, torch.float32)
    own_indices = empty(nnz, torch.int64)
    dealt = *_entries(indices, values), world_size, rank, limit, style
    room = messages.data_ptr(), stride, lengths.data_ptr()
    ends = arriving.data_ptr(), own_indices.data_ptr(), own_values.data_ptr()
    mine = _guarded(EXTENSION.deal_and_pack, *dealt, room, *ends, chosen())
    if mine < 0:
        return None
    cut = [messages[i * stride : i * stride + n] for i, n in enumerate(lengths.tolist())]
    return cut, arriving, (own_indices[:mine], own_values[:mine])


def unpack_and_sum(
    messages: Sequence[Tensor], rank: int, indices: Tensor, values: Tensor, style: Style, k: int
) -> tuple[Tensor, Tensor] | None:
    """Sum messages and ``rank``'s entries in rank order; return None if a message is malformed."""
    most = max(min(k, style[-1]), 0)
    room = empty(most, torch.int64), empty(most, torch.float32)
    given = _raw(messages), rank, *_entries(indices, values), style, k
    count = _guarded(EXTENSION.unpack_and_sum, *given, _room(room), chosen())
    return None if count < 0 else (room[0][:count], room[1][:count])


def unpack_and_undeal(
    messages: Sequence[Tensor],
    style: Style,
    size: int,
    k: int,
    rank: int,
    sums: Tensor,
    sent: tuple[Tensor, Tensor],
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Join all owners' messages into a vector of ``size`` elements.

    Return the vector's ``k`` largest entries, and the part of them that ``rank`` delivered: the entries
    that it ``sent``, plus the difference between its message and its ``sums``.  Return None if a message
    is malformed.
    """
    most = min(size, max(k, 0), sum(message.numel() for message in messages))
    rooms = [(empty(most, torch.int64), empty(most, torch.float32)) for _ in range(2)]
    own = rank, _address("sums", sums), sums.numel()
    given = _raw(messages), style, size, k, own, _entries(*sent)
    counts = _guarded(EXTENSION.unpack_and_undeal, *given, *map(_room, rooms), chosen())
    if counts[0] < 0:
        return None
    total, delivered = (
        (indices[:n], values[:n]) for (indices, values), n in zip(rooms, counts, strict=True)
    )
    return total, delivered


def _raw(messages: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(_address("message", m, torch.uint8), m.numel()) for m in messages]


def _room(pair: tuple[Tensor, Tensor]) -> tuple[int, int, int]:
    return pair[0].data_ptr(), pair[1].data_ptr(), pair[0].numel()


# ---- messages of regions -----------------------------------------------------------------------------


# the fields are: the first 8 bytes of a message with a count of 0; the form of its values (0 means coo);
# the values' block
Layout = tuple[int, int, int]
Share = Tensor | tuple[Tensor, Tensor]  # a message, or indices and values


def cut_messages(
    indices: Tensor, values: Tensor, boundaries: Sequence[int], own: int, layout: Layout
) -> list[Tensor]:
    """Cut entries at the boundaries; return one message per region, which is empty for ``own``."""
    # an entry takes at most 32 bits for its value and 35 for its index; every message also has a header
    room = 9 * values.numel() + 32 * len(boundaries)
    out = empty(room, torch.uint8)
    given = *_entries(indices, values), list(boundaries), own, layout
    ends = [0, *accumulate(_guarded(EXTENSION.cut, *given, out.data_ptr(), room, chosen()))]
    return [out[start:stop] for start, stop in pairwise(ends)]


def fold_messages(
    shares: Sequence[Share], layout: Layout, width: int
) -> tuple[Tensor, Tensor] | None:
    """Sum a region's shares in the given order; return None if a message is malformed."""
    return _unpacked(EXTENSION.fold, shares, layout, width)


def join_messages(
    messages: Sequence[Tensor], layout: Layout, spans: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor] | None:
    """Join messages for ascending regions ``[start, stop)``; return None if one is malformed."""
    return _unpacked(EXTENSION.join, messages, layout, list(spans))


def _unpacked(
    kernel: Any, shares: Sequence[Share], layout: Layout, where: object
) -> tuple[Tensor, Tensor] | None:
    raw: list[tuple[bool, int, int, int]] = []
    shares = [share.contiguous() if isinstance(share, Tensor) else share for share in shares]
    capacity = 0
    for share in shares:
        if isinstance(share, Tensor):
            raw.append((True, _address("message", share, torch.uint8), 0, share.numel()))
            capacity += share.numel() // _ENTRY_BYTES[layout[1]]
        else:
            raw.append((False, *_entries(*share)))
            capacity += share[1].numel()
    indices, values = empty(capacity, torch.int64), empty(capacity, torch.float32)
    count = _guarded(kernel, raw, layout, where, _room((indices, values)), chosen())
    return None if count < 0 else (indices[:count], values[:count])


# ---- passing tensors ------------------------------------------------------------------------------


def _address(name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigurationError(
            f"{name} is {tensor.dtype} on {tensor.device} with strides {tensor.stride()}; the native "
            f"kernels take contiguous {dtype} on the CPU: call sparsync.kernels, which chooses"
        )
    return tensor.data_ptr()


def _entries(indices: Tensor, values: Tensor) -> tuple[int, int, int]:
    """Return the addresses of indices and values, and the number of entries."""
    if indices.dim() != 1 or indices.shape != values.shape:
        raise ConfigurationError(
            f"indices {tuple(indices.shape)} and values {tuple(values.shape)} must be 1-D and "
            "equally long"
        )
    addresses = _address("indices", indices, torch.int64), _address("values", values)
    return *addresses, values.numel()


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor on the CPU, whatever the default device is; unwritten memory costs nothing."""
    return torch.empty(count, dtype=dtype, device="cpu")


def _guarded(kernel: Callable[..., Any], *arguments: object) -> Any:
    """Call a kernel that checks its arguments; convert its ValueError to a ConfigurationError."""
    try:
        return kernel(*arguments)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
