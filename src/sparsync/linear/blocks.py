"""A text file as blocks of whole lines, so that ranks read different blocks, plain or compressed.

Block b holds the lines that *start* in bytes `[b * block_bytes, (b + 1) * block_bytes)` of the
(uncompressed) text: every line is in exactly one block, whatever its length.
"""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from sparsync.errors import ConfigurationError

__all__ = ["LineBlocks"]

_GZIP, _BZIP2 = b"\x1f\x8b", b"BZh"  # the first bytes of such files


@dataclass(frozen=True)
class LineBlocks:
    r"""A file cut into blocks of lines.  Compressed files are told by their first bytes.

    Args:
        path: the file.
        block_bytes: size of a block, in bytes of uncompressed text.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     file.write(b"1 2:3\n0\n1 4:5\n") and file.flush()
        ...     list(LineBlocks(Path(file.name), block_bytes=7))
        [b'1 2:3\n0\n', b'1 4:5\n']
    """

    path: Path
    block_bytes: int

    def __post_init__(self) -> None:
        if self.block_bytes < 1:
            raise ConfigurationError(f"block_bytes {self.block_bytes}; expected at least 1")
        if not self.path.is_file():
            raise ConfigurationError(f"{self.path} is not a file; give the path of a data file")

    @property
    def seekable(self) -> bool:
        """Whether a block can be read without those before it: the file is not compressed."""
        with self.path.open("rb") as file:
            return not file.read(3).startswith((_GZIP, _BZIP2))

    @property
    def count(self) -> int:
        """The number of blocks of a file that is not compressed."""
        return -(-self.path.stat().st_size // self.block_bytes)

    def read(self, number: int) -> bytes:
        """Return one block; of a compressed file this reads through all before it."""
        if not self.seekable:
            return next((text for n, text in enumerate(self) if n == number), b"")
        start, stop = number * self.block_bytes, (number + 1) * self.block_bytes
        with self.path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # what starts before belongs to the block before
            return _lines(file, stop - file.tell())

    def __iter__(self) -> Iterator[bytes]:
        return self.stream()

    def stream(self, progress: Callable[[float], None] | None = None) -> Iterator[bytes]:
        """Read the file once and give its blocks in order.

        Args:
            progress: called after every block with the fraction of the file that is read.

        Raises:
            ConfigurationError: the compressed data is damaged.
        """
        position = number = 0
        whole = max(self.path.stat().st_size, 1)
        with self.path.open("rb") as file, _opened(file) as text:
            while True:
                number += 1
                try:
                    block = _lines(text, number * self.block_bytes - position)
                except (EOFError, OSError, zlib.error) as error:
                    raise ConfigurationError(
                        f"{self.path} cannot be read past {position:,} bytes of text ({error}); "
                        "check the file"
                    ) from error
                position += len(block)
                if not block and position < number * self.block_bytes:
                    return
                if progress:
                    progress(file.tell() / whole)
                yield block

    def lines_before(self, number: int) -> int:
        """Count the lines before a block; reads them all, so only an error message asks for it."""
        return sum(text.count(b"\n") for n, text in zip(range(number), self, strict=False))


def _opened(file: IO[bytes]) -> IO[bytes]:
    """Open the text within a file that was opened as bytes."""
    start = file.read(3)
    file.seek(0)
    if start.startswith(_GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    return cast(IO[bytes], bz2.BZ2File(file)) if start == _BZIP2 else file


def _lines(file: IO[bytes], length: int) -> bytes:
    """Read so many bytes and on to the end of the line; nothing if the last line was longer."""
    text = file.read(max(length, 0))
    return text if not text or text.endswith(b"\n") else text + file.readline()
