"""QSGD: values at 2, 4 or 8 bits, rounded at random so that the expectation is exact."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass, replace
from typing import Final, Literal, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import packing
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import LONG_HEADER_BYTES, Codec, Encoded, Header, V

__all__ = ["Qsgd", "Quantiser", "SparseQsgd"]

_BITS: Final = (2, 4, 8)
_BLOCK_LIMIT: Final = 1 << 16
_SCALE_BYTES: Final = 4
_MAX_SCALED, _SHRUNK = 16, 32  # bits of the option byte, above the number of bits
_FLOAT32_MAX = torch.finfo(torch.float32).max


class _Quantised(Codec[V]):
    """The part of both codecs that does not depend on where the values stand."""

    options = tuple(bits + flags for bits in _BITS for flags in (0, 16, 32, 48))
    header_bytes = LONG_HEADER_BYTES

    def __init__(
        self,
        bits: int = 4,
        *,
        block: int = 1024,
        scale: Literal["l2", "max"] = "l2",
        shrink: bool = False,
        seed: int = 0,
    ) -> None:
        self.quantiser = Quantiser(bits, block, scale, shrink, seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.quantiser.arguments})"

    @property
    def contractive(self) -> bool:
        """``E |x - Q(x)|^2 < |x|^2``: the error may be kept in the residual."""
        return self.quantiser.contractive

    def seeded(self, rank: int, step: int) -> Codec[V]:
        """Return a copy that draws for this rank and step."""
        twin = copy.copy(self)
        twin.quantiser = replace(self.quantiser, rank=rank, step=step)
        return twin

    def header(self, nnz: int, size: int, dtype: torch.dtype) -> Header:
        """Return the header of a message: bits, scale and shrink as option, the block as detail."""
        return Header(self.format, dtype, nnz, self.quantiser.option, size, self.quantiser.block)

    def is_legal(self, header: Header) -> bool:
        """Tell whether there is a block length."""
        return header.detail > 0

    def layout(self, header: Header) -> Parts:
        """Return 16 bytes of header, and the bytes of scales and codes."""
        count, bits = header.entries, header.option & 15
        scales = _SCALE_BYTES * -(-count // header.detail)
        return Parts(LONG_HEADER_BYTES, value=scales + (count * bits + 7) // 8)

    def round(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and codes, and what the receiver makes of them, in the dtype of ``values``."""
        single = packing.to_float32(values, packing.FP32)
        raw = self.quantiser.quantise(single, torch.finfo(values.dtype).max)
        return raw, self.quantiser.dequantise(raw, values.numel()).to(values.dtype)


@final
class Qsgd(_Quantised[DenseVector]):
    """Dense vectors, quantised at random: see ``docs/wire-format.md`` and ``Quantiser``.

    Unbiased: the expectation of what is decoded is the float32 that was given, to 2^-24 of its
    block's scale, without ``shrink``; that of a 16-bit dtype is then rounded to it.  An entry that is NaN
    or Inf arrives as NaN and leaves its block's scale alone.

    Args:
        bits: per value, sign included: 2, 4 or 8.
        block: consecutive entries that share a float32 scale (SparCML, section 6: "in the order of
            1024").
        scale: "l2" (QSGD's own; unbounded noise where blocks are long) or "max" (less noise).
        shrink: multiply by ``1 / (1 + omega)``, omega being the bound of the variance: not unbiased
            any more, but ``contractive``.
        seed: of the draws, with the rank and the step that ``seeded`` sets.

    Cost: 16 bytes, ``bits`` per value and 32 per block; about 10 passes over the values.   State: none.
    Differs from the paper: codes of fixed width, not Elias's; scale "max"; shrink; NaN and Inf survive.

    Example:
        >>> encoded = Qsgd(bits=4, scale="max").encode(DenseVector(torch.tensor([7.0, -3.0, 0.0])))
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([0, 0, 224, 64, 215, 0], [7.0, -3.0, 0.0])

    References: Alistarh et al., QSGD, NeurIPS 2017, section 3; Renggli et al., SparCML, SC 2019,
    section 6.
    """

    format = 4

    def encode(self, vector: DenseVector) -> Encoded[DenseVector]:
        """Encode; the same values, seed, rank and step give the same bytes."""
        start = self.start(vector)
        raw, decoded = self.round(vector.values)
        return Encoded(self.message(start, raw), DenseVector(decoded))

    def decode(self, payload: Tensor, size: int) -> DenseVector:
        """Decode, as the message says that it was quantised.

        Raises:
            WireFormatError: the payload is not a qsgd message of ``size`` elements.
        """
        header, body = self.body(payload, size)
        values = Quantiser.of_message(header).dequantise(body, size)
        return DenseVector(values.to(header.dtype))

    def header(self, nnz: int, size: int, dtype: torch.dtype) -> Header:
        """Return the header of a message of ``size`` values."""
        return super().header(size, size, dtype)

    def is_legal(self, header: Header) -> bool:
        """Tell whether there is a block length, and a value per element."""
        return super().is_legal(header) and header.entries == header.size


@final
class SparseQsgd(_Quantised[SparseVector]):
    """Sparse vectors: values quantised at random, blocks of consecutive entries; Elias-Fano indices.

    Arguments and promises are those of ``Qsgd``.  Zeros that rounding made still travel.

    Cost: 16 bytes; ``bits`` per value and 32 per block; indices as in ``Packed``.   State: none.
    Differs from the paper: as ``Qsgd``; SparCML quantises dense messages alone (section 6), though its
    Algorithm 1 reads as if sparse ones were, too.

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 7.0, -3.0, 0.0]))
        >>> encoded = SparseQsgd(bits=4, scale="max").encode(v)
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([0, 0, 224, 64, 215, 21], [7.0, -3.0])

    References: Alistarh et al., QSGD, NeurIPS 2017; Renggli et al., SparCML, SC 2019, Algorithm 1.
    """

    format = 5

    def encode(self, vector: SparseVector) -> Encoded[SparseVector]:
        """Encode; ``decoded`` has the same indices and rounded values."""
        start, indices, size = self.start(vector), vector.indices, vector.size
        raw, rounded = self.round(vector.values)
        payload = self.message(start, raw, packing.pack_indices(indices.contiguous(), size))
        return Encoded(payload, SparseVector(indices, rounded, size))

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode, as the message says that it was quantised.

        Raises:
            WireFormatError: the payload is not a sparse qsgd message for ``size`` elements.
        """
        header, body = self.body(payload, size)
        middle = super().layout(header).value
        indices = packing.unpack_indices(body[middle:], header.entries, size)
        values = Quantiser.of_message(header).dequantise(body[:middle], header.entries)
        return SparseVector(indices, values.to(header.dtype), size)

    def layout(self, header: Header) -> Parts:
        """Return 16 bytes of header, and the bytes of scales, codes and indices."""
        assert header.size is not None
        index = packing.index_bytes(header.entries, header.size)
        return super().layout(header) + Parts(index=index)


@dataclass(frozen=True)
class Quantiser:
    """Rounds values at random to multiples of a block's scale, so that the expectation is exact.

    Of a block of entries with scale S, x becomes ``sign(x) S j / s`` where j is ``s |x| / S`` rounded up
    with the probability of its fraction, else down; s = ``2^(bits - 1) - 1``.

    Attributes:
        bits: per value, sign included: 2, 4 or 8.
        block: consecutive entries that share a scale (QSGD's bucket), below 2^16.
        scale: S = ``|x|_2`` of the block (QSGD's own) or ``max |x|``.
        shrink: decoded values are multiplied by ``1 / (1 + omega)``.
        seed: of the draws, with rank, step and the message itself: messages of one step differ.
        rank: the source.
        step: 0-based.

    Example:
        >>> Quantiser(bits=4).levels, Quantiser(bits=4, scale="max").omega(256)
        (7, 0.7453996981544782)
    """

    bits: int = 4
    block: int = 1024
    scale: Literal["l2", "max"] = "l2"
    shrink: bool = False
    seed: int = 0
    rank: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ConfigurationError(f"bits={self.bits} per value is unknown; use 2, 4 or 8")
        if not 1 <= self.block < _BLOCK_LIMIT:
            raise ConfigurationError(
                f"block={self.block} entries cannot share a scale; use 1 to {_BLOCK_LIMIT - 1}"
            )
        if self.scale not in ("l2", "max"):
            raise ConfigurationError(f"scale={self.scale!r} is unknown; use 'l2' or 'max'")

    @staticmethod
    def of_message(header: Header) -> Quantiser:
        """Return the quantiser that wrote a message, but for its seed."""
        option = header.option
        scale: Literal["l2", "max"] = "max" if option & _MAX_SCALED else "l2"
        return Quantiser(option & 15, header.detail, scale, bool(option & _SHRUNK))

    @property
    def arguments(self) -> str:
        """Every argument but rank and step: ranks compare options by it."""
        names = ("bits", "block", "scale", "shrink", "seed")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    @property
    def option(self) -> int:
        """The option byte: bits, plus 16 for the scale "max", plus 32 for shrink."""
        return self.bits + _MAX_SCALED * (self.scale == "max") + _SHRUNK * self.shrink

    @property
    def levels(self) -> int:
        """The largest code s; the one below -s is left for what is not finite."""
        return (1 << (self.bits - 1)) - 1

    @property
    def contractive(self) -> bool:
        """``E |x - Q(x)|^2 < |x|^2`` for every x that is not zero, as error feedback needs."""
        return self.shrink or self.omega(self.block) < 1

    def omega(self, length: int) -> float:
        """Bound the variance of a block of ``length`` entries: ``E |x - Q(x)|^2 <= omega |x|^2``.

        "l2": ``min(length / s^2, sqrt(length) / s)`` (QSGD, Lemma 3.1).  "max": the worst block has one
        entry S and others all at the same part of the first level, and gives, exactly,
        ``(sqrt(1 + (length - 1) / s^2) - 1) / 2`` (derived here).  Both without shrink.
        """
        s = self.levels
        if self.scale == "l2":
            return min(length / s**2, math.sqrt(length) / s)
        return (math.sqrt(1 + max(length - 1, 0) / s**2) - 1) / 2

    def quantise(self, values: Tensor, largest: float) -> Tensor:
        """Return scales and codes of float32 ``values`` as ``torch.uint8``.

        Args:
            values: `[count]`; NaN and Inf get a code of their own and leave the scale alone.
            largest: no decoded magnitude exceeds it; at least the largest finite one of ``values``.
        """
        count, rows = values.numel(), self._rows(values.numel())
        padded = values.new_zeros(rows * self.block)
        padded[:count] = values
        blocks = padded.view(rows, self.block)
        finite = blocks.isfinite()
        magnitudes = torch.where(finite, blocks.abs(), 0.0)
        scales = self._scales(magnitudes, min(largest, _FLOAT32_MAX))
        divisors = torch.where(scales == 0, 1.0, scales)[:, None]
        exact = magnitudes / divisors * self.levels
        lower = exact.floor()
        # a draw is a multiple of 2^-24, and below 1: what lies on a level stays there
        up = self._draws(values, rows * self.block).view_as(blocks) < exact - lower
        codes = torch.where(blocks < 0, -(lower + up), lower + up)
        codes = torch.where(finite, codes, float(-self.levels - 1)).to(torch.int8)
        packed = self._pack(codes.flatten()[:count].view(torch.uint8))
        return torch.cat([scales.view(torch.uint8), packed])

    def dequantise(self, raw: Tensor, count: int) -> Tensor:
        """Return the `[count]` float32 values of the scales and codes ``raw``.

        Raises:
            WireFormatError: bits are set after the last code.
        """
        middle = _SCALE_BYTES * self._rows(count)
        scales = raw[:middle].clone().view(torch.float32)  # a copy is aligned
        codes = self._unpack(raw[middle:])
        if bool(codes[count:].any()):
            raise WireFormatError(
                f"a message of {count} quantised values has bits set after the last; it is corrupt"
            )
        spread = scales.repeat_interleave(self.block, output_size=scales.numel() * self.block)
        return self._table(count, raw.device).index_select(0, codes[:count]) * spread[:count]

    def _rows(self, count: int) -> int:
        return -(-count // self.block)

    def _scales(self, magnitudes: Tensor, largest: float) -> Tensor:
        """Return one float32 per row; a scale cut to ``largest`` is above all entries all the same."""
        if self.scale == "max":
            return magnitudes.amax(1)
        # squares of float32 neither overflow nor vanish in float64; pairs are added in an order that
        # no machine changes, as ``sum`` would
        squares = magnitudes.double().square()
        while squares.shape[1] > 1:
            half = (squares.shape[1] + 1) // 2
            tail = squares[:, half:]
            squares = squares[:, :half].contiguous()
            squares[:, : tail.shape[1]] += tail
        return squares[:, 0].sqrt().clamp(max=largest).to(torch.float32)

    def _draws(self, values: Tensor, count: int) -> Tensor:
        """Draw ``count`` numbers in [0, 1): the same on every machine, for they are drawn on the CPU."""
        # what a rank quantises late in a step may depend on what it drew earlier in it, and equal draws
        # would then have an expectation of their own; so the message has its part in the seed
        content = int(values.view(torch.int32).sum(dtype=torch.int64))
        name = f"{self.seed} {self.rank} {self.step} {values.numel()} {content}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        draws = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")
        return draws.to(values.device)

    def _pack(self, codes: Tensor) -> Tensor:
        """Pack uint8 codes, of which the lowest bits count, the first code lowest in its byte."""
        each = 8 // self.bits
        padded = codes.new_zeros(-(-codes.numel() // each) * each)
        padded[: codes.numel()] = codes & ((1 << self.bits) - 1)
        columns = padded.view(-1, each)
        packed = columns[:, 0].clone()
        for i in range(1, each):
            packed |= columns[:, i] << (self.bits * i)
        return packed

    def _unpack(self, packed: Tensor) -> Tensor:
        """Return all codes of the bytes, as int32 in ``[0, 2^bits)``."""
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=packed.device)
        codes = (packed[:, None] >> shifts) & ((1 << self.bits) - 1)
        return codes.flatten().to(torch.int32)

    def _table(self, count: int, device: torch.device) -> Tensor:
        """Return what every code is multiplied with its scale as: two's complement, -s - 1 is NaN."""
        longest = min(count, self.block)
        factor = 1 / (1 + self.omega(longest)) if self.shrink else 1.0
        s = self.levels
        upper = [factor * code / s for code in range(s + 1)]
        lower = [factor * code / s for code in range(-s, 0)]
        return torch.tensor([*upper, math.nan, *lower], dtype=torch.float32, device=device)
