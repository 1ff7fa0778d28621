"""QSGD rounds values stochastically to few bits, in blocks that share a scale."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass, field
from typing import Final, Literal, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import packing
from sparsync.kernels.normal_levels import pack_codes, sums_of_halves, unpack_codes
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.codec import LONG_HEADER_BYTES, Codec, Encoded, Header, V, check_block, check_end

__all__ = ["Qsgd", "SparseQsgd"]

_BITS: Final = (2, 4, 8)
_SCALE_BYTES: Final = 4
_MAX_SCALED, _SHRUNK = 16, 32  # bits of the option byte, above the number of bits
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(eq=False)
class _Quantised(Codec[V]):
    """The common part of the dense and the sparse QSGD codec."""

    options = tuple(bits + flags for bits in _BITS for flags in (0, 16, 32, 48))
    header_bytes = LONG_HEADER_BYTES

    bits: int = 4
    block: int = field(default=1024, kw_only=True)
    scale: Literal["l2", "max"] = field(default="l2", kw_only=True)
    shrink: bool = field(default=False, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    source: tuple[int, int] = field(default=(0, 0), init=False, repr=False)  # rank and step

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ConfigurationError(f"bits={self.bits} per value is unknown; use 2, 4 or 8")
        check_block(self.block)
        if self.scale not in ("l2", "max"):
            raise ConfigurationError(f"scale={self.scale!r} is unknown; use 'l2' or 'max'")
        self.option = self.bits + _MAX_SCALED * (self.scale == "max") + _SHRUNK * self.shrink
        self.detail = self.block

    def seeded(self, rank: int, step: int) -> Codec[V]:
        """Return a copy whose random numbers depend on this rank and step."""
        twin = copy.copy(self)
        twin.source = rank, step
        return twin

    def layout(self, header: Header) -> Parts:
        """Return the numbers of bytes of header, scales and codes."""
        count, scales = header.entries, -(-header.entries // header.detail)
        codes = (count * (header.option & 15) + 7) // 8
        return Parts(LONG_HEADER_BYTES, value=_SCALE_BYTES * scales + codes)

    @property
    def levels(self) -> int:
        """The largest code s; the code -s - 1 stands for NaN and Inf."""
        return (1 << (self.bits - 1)) - 1

    @property
    def contractive(self) -> bool:
        """Whether ``omega`` of a whole block is below 1, or ``shrink`` makes the error small enough."""
        return self.shrink or self.omega(self.block) < 1

    def omega(self, length: int) -> float:
        """Bound the variance of a block of ``length`` entries: ``E |x - Q(x)|^2 <= omega |x|^2``.

        "l2": ``min(length / s^2, sqrt(length) / s)`` (QSGD, Lemma 3.1).  "max": in the worst block one
        entry is S and all others are the same fraction of the first level, which gives exactly
        ``(sqrt(1 + (length - 1) / s^2) - 1) / 2`` (derived for this library).  Both bounds hold without
        shrink.

        Example:
            >>> Qsgd(bits=4, scale="max").omega(256)
            0.7453996981544782
        """
        s = self.levels
        if self.scale == "l2":
            return min(length / s**2, math.sqrt(length) / s)
        return (math.sqrt(1 + max(length - 1, 0) / s**2) - 1) / 2

    def round(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and codes as bytes, and the decoded values in the dtype of ``values``."""
        single = packing.to_float32(values, packing.FP32)
        blocks = packing.in_blocks(single, self.block)
        finite = blocks.isfinite()
        magnitudes = torch.where(finite, blocks.abs(), 0.0)
        scales = self._scales(magnitudes, min(torch.finfo(values.dtype).max, _FLOAT32_MAX))
        divisors = torch.where(scales == 0, 1.0, scales)[:, None]
        exact = magnitudes / divisors * self.levels
        lower = exact.floor()
        # stochastic rounding (QSGD, section 3) goes up with a probability equal to the fraction.
        # Draws are multiples of 2^-24 in [0, 1), so a value on a level stays there
        up = self._draws(single, blocks.numel()).view_as(blocks) < exact - lower
        codes = torch.where(blocks < 0, -(lower + up), lower + up)
        codes = torch.where(finite, codes, float(-self.levels - 1)).to(torch.int8)
        packed = pack_codes(codes.flatten()[: values.numel()].view(torch.uint8), self.bits)
        raw = torch.cat([scales.view(torch.uint8), packed])
        return raw, self._values(raw, values.numel()).to(values.dtype)

    def unpack(self, header: Header, raw: Tensor) -> Tensor:
        """Decode the scales and codes in ``raw`` with the parameters that the header states."""
        option = header.option
        scale: Literal["l2", "max"] = "max" if option & _MAX_SCALED else "l2"
        shrink = bool(option & _SHRUNK)
        sender = type(self)(option & 15, block=header.detail, scale=scale, shrink=shrink)
        return sender._values(raw, header.entries).to(header.dtype)

    def _values(self, raw: Tensor, count: int) -> Tensor:
        middle = _SCALE_BYTES * -(-count // self.block)
        # a message may start at any byte, but ``view`` needs aligned memory
        scales, codes = raw[:middle].clone().view(torch.float32), raw[middle:]
        check_end(codes, self.bits, count)
        # codes are in two's complement; the code -s - 1 stands for NaN and Inf, and is decoded as NaN
        factor = 1 / (1 + self.omega(min(count, self.block))) if self.shrink else 1.0
        s = self.levels
        upper = [factor * code / s for code in range(s + 1)]
        lower = [factor * code / s for code in range(-s, 0)]
        meanings = torch.tensor([*upper, math.nan, *lower], dtype=torch.float32, device=raw.device)
        values = meanings[unpack_codes(codes, self.bits, count).int()]
        return values * packing.spread(scales, self.block, count)

    def _scales(self, magnitudes: Tensor, largest: float) -> Tensor:
        """Return a float32 scale per row, at most ``largest``; no entry exceeds its scale."""
        if self.scale == "max":
            return magnitudes.amax(1)
        # squares of float32 values neither overflow nor underflow in float64
        squares = sums_of_halves(magnitudes.double().square())
        return squares[:, 0].sqrt().clamp(max=largest).to(torch.float32)

    def _draws(self, values: Tensor, count: int) -> Tensor:
        """Draw ``count`` numbers in [0, 1) on the CPU, so that they are the same on every machine."""
        # The values are part of the seed, because values that a rank quantises late in a step may depend
        # on its earlier draws in that step.  Reusing the same draws would bias the later values.
        content = int(values.view(torch.int32).sum(dtype=torch.int64))
        rank, step = self.source
        name = f"{self.seed} {rank} {step} {values.numel()} {content}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        draws = torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")
        return draws.to(values.device)


@final
@dataclass(eq=False)
class Qsgd(_Quantised[DenseVector]):
    """Writes stochastically quantised dense vectors; see ``docs/wire-format.md``.

    In a block of scale S, x becomes ``sign(x) S j / s``, where j is ``s |x| / S`` rounded up with a
    probability equal to its fraction, otherwise down; s = ``2^(bits - 1) - 1``.

    Without ``shrink`` the codec is unbiased: the expected decoded value is the original float32 value,
    up to 2^-24 of its block's scale (or 2^-149, if that is larger).  If the vector has a 16-bit dtype,
    the decoded values are then rounded to it.  A NaN or Inf entry arrives as NaN and does not affect its
    block's scale.

    Args:
        bits: bits per value, including the sign: 2, 4 or 8.
        block: consecutive entries that share a float32 scale (SparCML, section 6: "in the order of
            1024").
        scale: "l2" (as in QSGD; its noise grows with the block length) or "max" (less noise).
        shrink: multiply decoded values by ``1 / (1 + omega)``, where omega bounds the variance.  This
            makes the codec ``contractive``, but biased.
        seed: seed of the random numbers, together with the rank and step that ``seeded`` sets.

    Cost: 16 bytes, plus ``bits`` bits per value and 32 bits per block; about 10 passes over the values.
    State: none.
    Differs from the paper: codes have a fixed width (the paper uses Elias codes); scale "max"; shrink;
    NaN and Inf arrive as NaN.

    Example:
        >>> encoded = Qsgd(bits=4, scale="max").encode(DenseVector(torch.tensor([7.0, -3.0, 0.0])))
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([0, 0, 224, 64, 215, 0], [7.0, -3.0, 0.0])

    References: Alistarh et al., QSGD, NeurIPS 2017, section 3; Renggli et al., SparCML, SC 2019,
    section 6.
    """

    format = 4
    is_dense = True

    def encode(self, vector: DenseVector) -> Encoded[DenseVector]:
        """Encode a vector; the same values, seed, rank and step give the same bytes."""
        start = self.start(vector)
        raw, decoded = self.round(vector.values)
        return Encoded(self.message(start, raw), DenseVector(decoded))

    def decode(self, payload: Tensor, size: int) -> DenseVector:
        """Decode a message with the parameters that its header states."""
        return DenseVector(self.unpack(*self.body(payload, size)))


@final
@dataclass(eq=False)
class SparseQsgd(_Quantised[SparseVector]):
    """Writes sparse vectors, with values as in ``Qsgd`` and Elias-Fano indices as in ``Packed``.

    Blocks consist of consecutive entries.  Entries that round to zero are still sent.

    Cost: as ``Qsgd``, plus the indices of ``Packed``.   State: none.
    Differs from the paper: as ``Qsgd``; SparCML quantises only dense messages (section 6), although its
    Algorithm 1 reads as if it also quantised sparse ones.

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 7.0, -3.0, 0.0]))
        >>> encoded = SparseQsgd(bits=4, scale="max").encode(v)
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([0, 0, 224, 64, 215, 21], [7.0, -3.0])

    References: as ``Qsgd``; SparCML, Algorithm 1.
    """

    format = 5

    def encode(self, vector: SparseVector) -> Encoded[SparseVector]:
        """Encode a vector; ``decoded`` has the same indices and rounded values."""
        start, indices, size = self.start(vector), vector.indices, vector.size
        raw, rounded = self.round(vector.values)
        payload = self.message(start, raw, packing.pack_indices(indices.contiguous(), size))
        return Encoded(payload, SparseVector(indices, rounded, size))

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode a message with the parameters that its header states."""
        header, body = self.body(payload, size)
        middle = super().layout(header).value
        indices = packing.unpack_indices(body[middle:], header.entries, size)
        return SparseVector(indices, self.unpack(header, body[:middle]), size)

    def layout(self, header: Header) -> Parts:
        """Return the numbers of bytes of header, scales and codes, and indices."""
        assert header.size is not None
        index = packing.index_bytes(header.entries, header.size)
        return super().layout(header) + Parts(index=index)
