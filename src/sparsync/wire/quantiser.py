"""Stochastic quantisation of float32 values to 2, 4 or 8 bits: the arithmetic of QSGD, no headers."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError

__all__ = ["BITS", "BLOCK_LIMIT", "Quantiser"]

BITS: Final = (2, 4, 8)
BLOCK_LIMIT: Final = 1 << 16
_SCALE_BYTES: Final = 4
_MAX_SCALED, _SHRUNK = 16, 32  # bits of the option byte, above the number of bits
_FLOAT32_MAX = torch.finfo(torch.float32).max


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
        if self.bits not in BITS:
            raise ConfigurationError(f"bits={self.bits} per value is unknown; use 2, 4 or 8")
        if not 1 <= self.block < BLOCK_LIMIT:
            raise ConfigurationError(
                f"block={self.block} entries cannot share a scale; use 1 to {BLOCK_LIMIT - 1}"
            )
        if self.scale not in ("l2", "max"):
            raise ConfigurationError(f"scale={self.scale!r} is unknown; use 'l2' or 'max'")

    @staticmethod
    def of_message(option: int, block: int) -> Quantiser:
        """Return what wrote a message with this option byte and block."""
        scale: Literal["l2", "max"] = "max" if option & _MAX_SCALED else "l2"
        return Quantiser(option & 15, block, scale, bool(option & _SHRUNK))

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
        ``(sqrt(1 + (length - 1) / s^2) - 1) / 2`` (ours).  Without shrink, in both.
        """
        s = self.levels
        if self.scale == "l2":
            return min(length / s**2, math.sqrt(length) / s)
        return (math.sqrt(1 + max(length - 1, 0) / s**2) - 1) / 2

    def value_bytes(self, count: int) -> int:
        """Return the exact bytes of ``count`` values: scales, then codes."""
        return self._scale_bytes(count) + (count * self.bits + 7) // 8

    def quantise(self, values: Tensor, largest: float) -> Tensor:
        """Return scales and codes of float32 ``values`` as `[value_bytes]` with ``torch.uint8``.

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
        """Return the `[count]` float32 values of ``raw``, which has ``value_bytes(count)`` bytes.

        Raises:
            WireFormatError: bits are set behind the last code.
        """
        middle = self._scale_bytes(count)
        scales = raw[:middle].clone().view(torch.float32)  # a copy is aligned
        codes = self._unpack(raw[middle:])
        if bool(codes[count:].any()):
            raise WireFormatError(
                f"a message of {count} quantised values has bits set behind the last; it is corrupt"
            )
        spread = scales.repeat_interleave(self.block, output_size=scales.numel() * self.block)
        return self._table(count, raw.device).index_select(0, codes[:count]) * spread[:count]

    def _rows(self, count: int) -> int:
        return -(-count // self.block)

    def _scale_bytes(self, count: int) -> int:
        return _SCALE_BYTES * self._rows(count)

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
