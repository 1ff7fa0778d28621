"""Who is present: a view that all ranks reach by the same merges, whatever the order of the news."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

__all__ = ["Membership"]


@final
class Membership:
    """A generation per rank: even while it is present, odd while it is left out; it only grows.

    Args:
        world_size: number of ranks.
        now: when all of them were last heard.

    Attributes:
        generations: one per rank.
        heard: when each was last heard.
        gone: ranks that cannot come back, and why.

    Example:
        >>> members = Membership(3, now=0.0)
        >>> members.merge(members.toggled(1)), members.present, members.view != 0
        (True, [0, 2], True)
    """

    def __init__(self, world_size: int, now: float) -> None:
        self.generations = [0] * world_size
        self.heard = [now] * world_size
        self.gone: dict[int, str] = {}
        self.view = 0  # a fingerprint; 0 while nobody was ever left out

    @property
    def present(self) -> list[int]:
        """The ranks that take part, ascending."""
        return [rank for rank, g in enumerate(self.generations) if g % 2 == 0]

    def is_present(self, rank: int) -> bool:
        """Tell whether a rank takes part."""
        return self.generations[rank] % 2 == 0

    def hear(self, rank: int, now: float) -> None:
        """Note a sign of life."""
        self.heard[rank] = now

    def toggled(self, rank: int) -> list[int]:
        """Return the generations with one rank left out, or back."""
        return [g + (r == rank) for r, g in enumerate(self.generations)]

    def merge(self, generations: Sequence[int]) -> bool:
        """Take over what is newer; tell whether anything was."""
        newer = [max(pair) for pair in zip(self.generations, generations, strict=True)]
        if newer == self.generations:
            return False
        self.generations = newer
        digest = hashlib.blake2b(repr(newer).encode(), digest_size=8)
        self.view = int.from_bytes(digest.digest(), "little")
        return True
