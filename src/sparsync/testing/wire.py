"""Contract checks for a codec."""

from __future__ import annotations

from typing import Any

import torch

from sparsync.errors import WireFormatError
from sparsync.sparse import SparseVector
from sparsync.testing.cases import cases, same
from sparsync.wire import CODECS
from sparsync.wire.codec import Codec

__all__ = ["check_codec"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_codec(
    codec: Codec[SparseVector], *, contractive: bool = True, spreading: bool = False
) -> None:
    """Check a codec's round trips, sizes, budgets and number, and that it refuses malformed messages.

    ``decode`` must return the vector that ``encode`` returned as ``decoded``.  For an exact dtype, this
    is the encoded vector itself.  Otherwise, finite values must stay finite, nonfinite values nonfinite,
    and the error must not exceed the vector.  Bytes from the network may be anything.  ``decode`` must
    refuse every truncated message.  For a message with flipped bits, it must raise ``WireFormatError`` or
    return a valid vector.

    Args:
        codec: the codec to check.
        contractive: whether the error must not exceed the vector, as error feedback requires.
        spreading: whether NaN or Inf may make other entries nonfinite.

    Raises:
        AssertionError: a check failed; the message names the case and the violated requirement.

    Example:
        >>> from sparsync.wire import Coo
        >>> check_codec(Coo())
    """
    number = getattr(codec, "format", None)
    fits = type(number) is int and 1 <= number <= 255
    assert fits, f"{codec!r}: format is {number!r}; choose a number from 128 to 255"
    # two codecs with the same number would decode each other's messages instead of refusing them
    taken = [name for name, row in CODECS.items() if _takes(row, codec)]
    assert not taken, (
        f"{codec!r}: format {number} belongs to {', '.join(taken)}; choose another number"
    )
    for case in cases():
        for dtype in _DTYPES:
            vector = SparseVector.from_dense(case.make(0, 2, 1).to(dtype))
            _check(codec, vector, f"{codec!r}, case '{case.name}', {dtype}", contractive)
    for dtype in _DTYPES:
        _check_extremes(codec, dtype, spreading)
        # entries are far apart, with many at the end, because the length must not depend on their
        # positions
        indices = torch.cat(
            [
                torch.tensor([0, 70_000, 140_001], device="cpu"),
                torch.arange(299_000, 299_997, device="cpu"),
            ]
        )
        values = torch.ones(len(indices), dtype=dtype, device="cpu")
        far = SparseVector(indices, values, 300_000)
        _check(codec, far, f"{codec!r}, entries far apart, {dtype}", contractive)
    _check_budgets(codec, size=1000)
    for case in cases():
        vector = SparseVector.from_dense(case.make(0, 2, 1))
        _check_flips(codec, vector, f"{codec!r}, case '{case.name}'")


def _takes(row: Codec[Any], codec: Codec[Any]) -> bool:
    """Return whether a known codec has the same number, although neither is a variant of the other."""
    alike = isinstance(codec, type(row)) or isinstance(row, type(codec))
    return not alike and getattr(row, "format", None) == codec.format


def _check(codec: Codec[SparseVector], vector: SparseVector, where: str, contractive: bool) -> None:
    dtype = vector.values.dtype
    encoded = codec.encode(vector)
    assert encoded.payload.dtype == torch.uint8, f"{where}: payload is not bytes"
    nbytes = codec.nbytes(vector.nnz, vector.size, dtype)
    assert encoded.payload.numel() == nbytes, f"{where}: nbytes is wrong"
    # gloo pads messages to their sender's capacity, so the header alone must determine the length
    longer = torch.cat([encoded.payload, torch.zeros(9, dtype=torch.uint8, device="cpu")])
    assert codec.measure(longer).nbytes == nbytes, f"{where}: measure is wrong"
    decoded = codec.decode(encoded.payload, vector.size)
    assert decoded.values.dtype == dtype, f"{where}: the dtype changed to {decoded.values.dtype}"
    assert same(decoded, encoded.decoded), f"{where}: decode differs from decoded"
    if codec.is_exact(dtype):
        assert same(decoded, vector), f"{where}: an exact codec changed the vector"
    before = vector.to_dense().double()
    error = before - decoded.to_dense().double()
    assert not contractive or error.norm() <= before.norm(), (
        f"{where}: the error exceeds the vector"
    )
    # some cuts lie within the header of 8 bytes, others after it
    for length in {0, 1, 7, nbytes // 2, nbytes - 1} - {nbytes}:
        try:
            codec.decode(encoded.payload[:length], vector.size)
        except WireFormatError:
            continue
        raise AssertionError(f"{where}: {length} of {nbytes} bytes were accepted")


def _check_flips(codec: Codec[SparseVector], vector: SparseVector, where: str) -> None:
    """Check that a message with a flipped bit is refused or decoded to valid indices."""
    good = codec.encode(vector).payload
    length = good.numel()
    # flip bits in the whole header, in the bytes after it, and in some of the remaining bytes
    for at in sorted(
        {*range(min(length, 20)), *range(20, length, max(1, length // 8)), length - 1}
    ):
        for bit in (0, 3, 7):
            flipped = good.clone()
            flipped[at] ^= 1 << bit
            try:
                codec.decode(flipped, vector.size).check()
            except WireFormatError:
                continue
            except Exception as error:
                raise AssertionError(
                    f"{where}: bit {bit} of byte {at} of {length}, flipped, gave {error!r}; raise "
                    "WireFormatError for bytes that the codec never writes"
                ) from error


def _check_extremes(codec: Codec[SparseVector], dtype: torch.dtype, spreading: bool) -> None:
    """Check that NaN and Inf arrive at their own indices, so that all ranks refuse the step."""
    most = torch.finfo(dtype).max
    values = torch.tensor(
        [most, 1.0, float("inf"), -most, float("nan"), -float("inf"), 2.0],
        dtype=torch.float64,
        device="cpu",
    )
    for start in range(3):
        vector = SparseVector.from_dense(values[start:].to(dtype))
        where = f"{codec!r}, {vector.values.tolist()}, {dtype}"
        decoded = codec.decode(codec.encode(vector).payload, vector.size)
        sent, arrived = vector.isfinite(), decoded.isfinite()
        alike = bool(sent.all() == arrived.all()) if spreading else torch.equal(sent, arrived)
        assert alike, (
            f"{where}: {decoded.to_dense()[vector.indices].tolist()} arrived; finite values must stay "
            "finite (clamp before rounding), and NaN and Inf must arrive as NaN or Inf"
        )


def _check_budgets(codec: Codec[SparseVector], size: int) -> None:
    """Check that ``nbytes`` grows with the entries, and that ``entries_within`` is its inverse."""
    sizes = [codec.nbytes(nnz, size) for nnz in range(size + 1)]
    assert sizes == sorted(sizes), f"{codec!r}: fewer entries take more bytes"
    for budget in range(sizes[0], sizes[-1] + 2, 13):
        fitting = sum(nbytes <= budget for nbytes in sizes) - 1
        assert codec.entries_within(budget, size) == fitting, f"{codec!r}: {budget} bytes"
