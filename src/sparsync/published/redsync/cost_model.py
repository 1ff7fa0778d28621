"""RedSync's cost model: Equations 1 and 2, and the layer sizes above which compression pays.

    ======== ======================================================================================
    equation seconds for a layer of M bytes
    ======== ======================================================================================
    1        ``T_select + lg(p) alpha + (p - 1) M D beta + p gamma_1``, for messages of M D bytes
    2        ``2 lg(p) alpha + 2 (p - 1) / p M beta + (p - 1) / p M gamma_2``
    ======== ======================================================================================

Differs from the paper: Equation 1 holds for quantised messages, with one word per entry; plain messages
have two.  Equation 2 is taken from appendix B (section 5.4 prints gamma_2 without M).  The paper's
gamma_1 is in seconds per message; this module adds a term per byte of the message.  If P is not a power
of two, lg(p) is rounded up.  Headers are left out, as in the paper; ``costs.allgatherv(codec.nbytes(k,
size), p)`` counts them.

All terms are linear in M, so the sizes at which two of them cross have closed forms.

References: Fang et al., "RedSync: Reducing Synchronization Traffic for Distributed Deep Learning",
sections 5.2, 5.4 and appendix B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from sparsync.errors import ConfigurationError

__all__ = [
    "PLAIN",
    "QUANTIZED",
    "SelectionTimes",
    "SizeThresholds",
    "Timing",
    "equation_1",
    "equation_2",
    "size_thresholds",
]

PLAIN = 2  # words per entry: index and value
QUANTIZED = 1  # the index alone; the values share one mean per message


@dataclass(frozen=True)
class Timing:
    """Time as a linear function of a number of bytes.

    Example:
        >>> (Timing(1.0, 0.5) + Timing(2.0)).seconds(4)
        5.0
    """

    overhead: float = 0.0  # seconds, independent of the size
    per_byte: float = 0.0  # seconds

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.overhead + other.overhead, self.per_byte + other.per_byte)

    def times(self, factor: float) -> Timing:
        """Return the time of ``factor`` repetitions."""
        return Timing(factor * self.overhead, factor * self.per_byte)

    def seconds(self, nbytes: float) -> float:
        """Return ``overhead + per_byte * nbytes``."""
        return self.overhead + self.per_byte * nbytes

    def beats_from(self, other: Timing) -> float:
        """Return the size in bytes above which this time is always shorter than ``other``.

        The size is 0 if it is shorter at every size, and infinity if it is shorter at no size.

        Example:
            >>> Timing(3.0, 1.0).beats_from(Timing(1.0, 2.0))
            2.0
            >>> Timing(1.0, 2.0).beats_from(Timing(3.0, 1.0))
            inf
        """
        more, less = self.overhead - other.overhead, other.per_byte - self.per_byte
        if less > 0:
            return max(0.0, more / less)
        return 0.0 if less == 0 and more < 0 else math.inf


@dataclass(frozen=True)
class SelectionTimes:
    """Selection times for a layer of float32.

    The defaults are estimates for a GPU, not measurements: 10 microseconds per kernel launched from
    Python, and the algorithms' memory passes at 550 GB/s (3/4 of a P100's bandwidth).  On a CPU, this
    library's exact selection is the fastest.  ``sparsync bench --selectors`` measures the times on your
    hardware.
    """

    # top-k by magnitude is as slow as an allreduce at 3.5 GB/s (section 5.2, Figure 3)
    exact: Timing = Timing(100e-6, 2 / 3.5e9)
    # Algorithm 2: |x|, mean, max and 3 counts, 2 kernels to compact, and 2 for the top k
    trimmed: Timing = Timing(100e-6, 9 / 550e9)
    # Algorithm 3 with a search: |x|, mean, max, 8 counts, 2 kernels to compact
    search: Timing = Timing(130e-6, 14 / 550e9)
    reuse: Timing = Timing(30e-6, 4 / 550e9)  # with the last threshold: |x|, 2 kernels to compact
    reuse_period: int = 5  # steps per search (section 5.2.2)
    found: float = 1.5  # entries that a search selects, as a multiple of k; between 1 and 2

    @property
    def searched(self) -> Timing:
        """The mean time of Algorithm 3 over a period."""
        return (self.search + self.reuse.times(self.reuse_period - 1)).times(1 / self.reuse_period)


class SizeThresholds(NamedTuple):
    """Layer sizes in bytes from which each method is used; infinity if it is never used.

    The names match Algorithms 4 and 5, the options of the preset "redsync", and ``BySize``.
    """

    compress_thd: float  # smaller layers are dense (paper: 128 KB)
    thsd1: float  # trimmed top-k from this size on, exact top-k below (paper: ``compress_thd``)
    thsd2: float  # binary search with reuse from this size on (paper: 4 MB)


def equation_1(
    world_size: int,
    density: float,
    *,
    alpha: float,
    beta: float,
    select: Timing = Timing(),
    unpack: Timing = Timing(),
    words_per_entry: int = QUANTIZED,
) -> Timing:
    """Return ``T_sparse`` for a layer: the time to select, allgather, and add P messages.

    alpha is in seconds per message, beta in seconds per byte.  ``select`` depends on the bytes of the
    layer, ``unpack`` (gamma_1) on the bytes of one message.  ``words_per_entry`` is ``QUANTIZED``, as
    printed, or ``PLAIN``.

    Example:
        >>> sparse = equation_1(128, 0.001, alpha=0, beta=1)
        >>> dense = equation_2(128, alpha=0, beta=1)
        >>> round(sparse.per_byte / dense.per_byte, 3)  # P D / 2: not D
        0.064
    """
    _check(world_size, density)
    message = words_per_entry * density  # bytes per byte of the layer
    transfer = Timing(_rounds(world_size) * alpha, (world_size - 1) * message * beta)
    added = Timing(unpack.overhead, unpack.per_byte * message).times(world_size)
    return select + transfer + added


def equation_2(world_size: int, *, alpha: float, beta: float, gamma: float = 0.0) -> Timing:
    """Return ``T_dense`` as a function of a layer's bytes: Rabenseifner's allreduce.

    ``alpha`` and ``beta`` are as for ``equation_1``; ``gamma`` is gamma_2, in seconds per byte reduced.
    """
    _check(world_size, 1.0)
    share = (world_size - 1) / world_size
    return Timing(2 * _rounds(world_size) * alpha, share * (2 * beta + gamma))


def size_thresholds(
    world_size: int,
    density: float,
    *,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
    unpack: Timing = Timing(),
    selection: SelectionTimes = SelectionTimes(),
    words_per_entry: int = PLAIN,
) -> SizeThresholds:
    """Return the size thresholds that suit a network; in Algorithms 4 and 5, they are constants.

    Each selector is used above the size at which it beats the other selectors, including the cost of its
    longer or shorter messages.  Compression is used above the size at which Equation 1, with the selector
    for that size, falls below Equation 2.  The search sends up to twice as many entries as trimmed top-k
    (section 5.4), so it is never used on a slow network.

    The arguments have the same meaning as in the equations; use alpha = 0 if layers are fused into
    shared messages.  ``resolve("redsync", **size_thresholds(...)._asdict())`` is the preset with these
    thresholds.

    Example:
        >>> found = size_thresholds(8, 0.001, alpha=0, beta=1 / 3.5e9)
        >>> round(found.compress_thd / 1024)  # KB; the paper, on this network: 128
        101
        >>> size_thresholds(64, 0.05, alpha=1e-6, beta=1e-9)  # P D = 3.2: nothing is saved
        SizeThresholds(compress_thd=inf, thsd1=inf, thsd2=inf)
    """

    def sparse(select: Timing, found: float = 1.0) -> Timing:
        return equation_1(
            world_size,
            density * found,
            alpha=alpha,
            beta=beta,
            select=select,
            unpack=unpack,
            words_per_entry=words_per_entry,
        )

    exact, trimmed = sparse(selection.exact), sparse(selection.trimmed)
    search = sparse(selection.searched, selection.found)
    from_search = max(search.beats_from(exact), search.beats_from(trimmed))
    from_trimmed = min(trimmed.beats_from(exact), from_search)
    dense = equation_2(world_size, alpha=alpha, beta=beta, gamma=gamma)
    tiers = ((exact, 0.0), (trimmed, from_trimmed), (search, from_search))
    compress = min(max(method.beats_from(dense), start) for method, start in tiers)
    return SizeThresholds(compress, max(compress, from_trimmed), max(compress, from_search))


def _check(world_size: int, density: float) -> None:
    if world_size < 1:
        raise ConfigurationError(f"world_size is {world_size}; give at least 1 rank")
    if not density > 0:
        raise ConfigurationError(f"density is {density}; give k / n, above 0")


def _rounds(world_size: int) -> int:
    """Return the number of rounds, ``ceil(log2 P)``."""
    return (world_size - 1).bit_length()
