"""The header of every ZeroMQ message: 48 bytes that say whose it is, where it belongs, how long it is."""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple, final

from sparsync.errors import WireFormatError

__all__ = ["HEADER_BYTES", "TAGS", "Header", "Phases", "pack"]

MAGIC: Final = b"sz"
VERSION: Final = 1
# magic, version, flags, source, job, tag, phase, step, sequence, length
LAYOUT: Final = struct.Struct("<2sBBIQIIqQQ")
HEADER_BYTES: Final = LAYOUT.size

HELLO: Final = 1  # flag: a link was opened; nothing follows
APART: Final = 2  # flag: the payload is a frame of its own
TAGS: Final = 2**32  # channels are u32


class Header(NamedTuple):
    """What a receiver knows of a message before it looks at the payload.

    Attributes:
        flags: ``HELLO``, ``APART`` or 0 (the payload follows the header in the same frame).
        source: rank of the sender.
        job: number of the group, drawn by rank 0: messages of another job are not ours.
        tag: channel.
        phase: number of the phase's name; see ``Phases``.
        step: the sender's ``ledger.step``.
        sequence: number of this message among those of its source and tag, from 0.
        length: bytes of payload.

    Example:
        >>> raw = pack(0, 3, 7, 1, 9, 5, 0, 16)
        >>> len(raw), Header.parse(raw).source, Header.parse(raw).length
        (48, 3, 16)
    """

    flags: int
    source: int
    job: int
    tag: int
    phase: int
    step: int
    sequence: int
    length: int

    @classmethod
    def parse(cls, frame: bytes | memoryview) -> Header:
        """Read the header at the start of ``frame``.

        Raises:
            WireFormatError: too short, another protocol or another version.
        """
        if len(frame) < HEADER_BYTES:
            raise WireFormatError(
                f"a frame of {len(frame)} bytes holds no header of {HEADER_BYTES}; not our message"
            )
        magic, version, flags, source, job, tag, phase, step, sequence, length = LAYOUT.unpack_from(
            frame
        )
        if magic != MAGIC or version != VERSION or flags not in (0, HELLO, APART):
            raise WireFormatError(
                f"a frame starts with {bytes(frame[:4]).hex()}, not with {MAGIC.hex()} and version "
                f"{VERSION}; all ranks need the same version of sparsync"
            )
        return cls(flags, source, job, tag, phase, step, sequence, length)


def pack(
    flags: int,
    source: int,
    job: int,
    tag: int,
    phase: int,
    step: int,
    sequence: int,
    length: int,
) -> bytes:
    """Write a header; the arguments are the attributes of ``Header``."""
    return LAYOUT.pack(MAGIC, VERSION, flags, source, job, tag, phase, step, sequence, length)


@final
class Phases:
    """Numbers for the names of phases (CRC-32), and the names again for messages about them.

    Example:
        >>> phases = Phases()
        >>> phases.name(phases.number("split")), phases.name(7)
        ("'split'", 'number 0x7')
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def number(self, name: str) -> int:
        """Return the 32 bits that stand for ``name`` on the wire."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = zlib.crc32(name.encode())
            self._names[number] = name
        return number

    def name(self, number: int) -> str:
        """Return the quoted name, if this rank has used it; its number otherwise."""
        return f"'{self._names[number]}'" if number in self._names else f"number {number:#x}"
