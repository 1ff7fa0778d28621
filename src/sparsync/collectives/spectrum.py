"""Spectra: how many reduced entries a unit has from which magnitude on; and shares of a global k.

Pure integers and floats.  All ranks know the same spectra, so they agree without a message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Spectrum", "shares"]


class Spectrum(NamedTuple):
    """A cumulative histogram of magnitudes over all ranks.

    Attributes:
        keys: ascending magnitude keys; the first is 1: everything that is not zero.
        counts: entries of at least that magnitude; descending.

    Example:
        >>> Spectrum((1, 11), (8, 0)).count_from(6)
        4.0
    """

    keys: tuple[int, ...]
    counts: tuple[int, ...]

    def count_from(self, key: int) -> float:
        """Return about how many entries reach ``key``: linear between the known ones."""
        i = bisect_right(self.keys, key) - 1
        if i < 0:
            return float(self.counts[0])
        if i == len(self.keys) - 1:
            return float(self.counts[-1]) if key == self.keys[-1] else 0.0
        low, high = self.keys[i], self.keys[i + 1]
        done = (key - low) / (high - low)
        return self.counts[i] + done * (self.counts[i + 1] - self.counts[i])


def shares(
    spectra: Sequence[Spectrum], k: int, sizes: Sequence[int], last: Sequence[int]
) -> list[int]:
    """Divide k among units as the k largest of all their entries lie.

    Args:
        spectra: one per unit.
        k: what the shares sum to, if the units hold as much; at least one per unit that has elements.
        sizes: elements of every unit; no share exceeds them.
        last: the shares that the spectra were measured with.

    A unit whose entries all reach the common magnitude wants more than it could show: it gets twice
    its last share, at most.

    Example:
        >>> many, few = Spectrum((1, 100), (90, 0)), Spectrum((1, 100), (10, 0))
        >>> shares([many, few], 50, [1000, 1000], last=[25, 25])
        [45, 5]
    """
    least = [min(1, size) for size in sizes]
    wanted = max(k, sum(least))
    low, high = 1, max(spectrum.keys[-1] for spectrum in spectra)
    while low < high:  # the largest key that at least ``wanted`` entries reach
        middle = (low + high + 1) // 2
        if sum(s.count_from(middle) for s in spectra) >= wanted:
            low = middle
        else:
            high = middle - 1
    wishes = []
    for spectrum, known, smallest, size in zip(spectra, last, least, sizes, strict=True):
        wish = spectrum.count_from(low)
        saturated = spectrum.counts[0] > 0 and wish >= spectrum.counts[0] >= known
        wishes.append(min(max(2.0 * known if saturated else wish, smallest), size))
    return _apportion(wishes, wanted, least, sizes)


def _apportion(
    wishes: Sequence[float], wanted: int, least: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    """Round wishes to whole numbers that sum to ``wanted``, within the limits (largest remainders)."""
    wanted = min(wanted, sum(sizes))
    total = sum(wishes) or 1.0
    exact = [
        min(max(wish * wanted / total, a), b)
        for wish, a, b in zip(wishes, least, sizes, strict=True)
    ]
    result = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (result[i] - exact[i], i))
    missing = wanted - sum(result)
    while missing:
        step = 1 if missing > 0 else -1
        moved = 0
        for i in order if missing > 0 else reversed(order):
            if missing and least[i] <= result[i] + step <= sizes[i]:
                room = (sizes[i] - result[i]) if step > 0 else (result[i] - least[i])
                share = max(min(abs(missing) // len(order), room), 1)
                result[i] += step * share
                missing -= step * share
                moved += share
        if not moved:
            break
    return result
