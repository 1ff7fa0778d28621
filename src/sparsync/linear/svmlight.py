r"""Load svmlight / libsvm files: ``label [qid:q] index:value index:value ... [# comment]``.

::

    file --LineBlocks--> lines --parse_block--> rows --PartStore--> parts on disk --cut--> Shard

scikit-learn's compiled loader parses.  Where it refuses a block, or lets through what is not finite,
the lines are read again one by one, to say which of them is wrong and why.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np

from sparsync.errors import ConfigurationError
from sparsync.linear.cache import PartInfo, PartStore
from sparsync.linear.rows import Rows, Shard, narrowed, optional, row_range

__all__ = ["INDEX_BASE", "LineBlocks", "load_shard", "parse_block", "parse_line", "parse_lines"]

INDEX_BASE = 1  # subtracted from the indices in the file; most files count from 1
_GZIP, _BZIP2 = b"\x1f\x8b", b"BZh"  # the first bytes of such files
_LISTED = 10  # labels that a message lists
_SHOWN = 40  # characters of a bad token that a message quotes

Progress = Callable[[float], None]


def load_shard(
    source: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    dimensions: int | None = None,
    cache: Path | None = None,
    positive: float | Collection[float] | None = None,
    zero_based: bool | Literal["auto"] = "auto",
    block_bytes: int = 1 << 26,
    progress: Progress | None = None,
) -> Shard:
    r"""Load this rank's rows of an svmlight / libsvm file; plain, gzip or bzip2.

    The first time the text is parsed, block by block, into a cache: ranks that start together and
    share the cache parse different blocks, and read no others of a plain file (one that finds a
    block still missing parses it: no rank waits for another).  From then on a rank reads its rows
    only.  Rows are contiguous, and ranks' numbers of them differ by at most one.

    Args:
        source: the file.
        rank: this rank.
        world_size: number of ranks; may exceed the number of rows.
        dimensions: number of columns; default: as many as the file's largest index needs.
        cache: folder for the cache; default: ``<source>.cache`` next to the file.
        positive: the label, or labels, of +1; all others are -1.  Default: the larger of two.
        zero_based: whether the first column is 0 in the file; "auto": if there is an index 0
            anywhere in the file (scikit-learn's rule).
        block_bytes: text that is parsed at once; takes two (measured) to six times that in memory.
        progress: called with the fraction that is parsed, while it is.

    Returns:
        The shard.  Within one block its arrays are mapped from the cache, and read-only; else
        they are copied, 8 bytes per non-zero.

    Raises:
        ConfigurationError: a line is malformed (``file:line: ...``), the labels are not two and
            ``positive`` does not say more, or the cache cannot be written.

    Cost: about 40 MB of text per second, core and rank once; then reading the rank's arrays.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "tiny.svm")
        ...     path.write_text("2 1:0.5 4:1\n1 2:1\n1 1:3\n") and None
        ...     shard = load_shard(path, rank=1, world_size=2)
        >>> shard.features.toarray(), shard.labels, shard.rows_total, shard.first_row
        (array([[3., 0., 0., 0.]], dtype=float32), array([-1.], dtype=float32), 3, 2)
    """
    if zero_based not in (True, False, "auto"):
        raise ConfigurationError(f"zero_based={zero_based!r}; expected True, False or 'auto'")
    text = LineBlocks(Path(source), block_bytes)
    row_range(0, rank=rank, world_size=world_size)  # refuses a wrong rank before any work
    parts = _Parts(text, _store(text, cache))
    infos = parts.complete(rank, world_size, progress)
    if zero_based == "auto":
        zero_based = any(info.lowest < 0 for info in infos)
    base = 0 if zero_based else 1
    needed = max((info.highest for info in infos), default=0) + INDEX_BASE - base + 1
    width = max(needed, 1) if dimensions is None else dimensions
    if width < 1:
        raise ConfigurationError(f"dimensions {width}; expected at least 1")
    parts.check_indices(infos, base, base + width - 1)

    starts = np.cumsum([0, *(info.rows for info in infos)]).tolist()
    own = row_range(starts[-1], rank=rank, world_size=world_size)
    rows = Rows.join(list(parts.rows(starts, own)))
    plus = np.isin(rows.labels, sorted(_positive(infos, positive, text.path)))
    return Shard(
        features=rows.to_csr(width, shift=INDEX_BASE - base),
        labels=np.where(plus, 1, -1).astype(np.float32),
        rows_total=starts[-1],
        first_row=own[0],
    )


def _store(text: LineBlocks, cache: Path | None) -> PartStore:
    name = text.path.name
    folder = text.path.with_name(f"{name}.cache")
    if cache is not None:  # which may hold the caches of many files
        whole = str(text.path.resolve()).encode(errors="surrogateescape")
        folder = Path(cache) / f"{name}-{zlib.crc32(whole):08x}"
    return PartStore(folder, state=text.state(), cut=str(text.block_bytes))


def _positive(
    infos: list[PartInfo], positive: float | Collection[float] | None, path: Path
) -> set[float]:
    """Decide which labels are +1."""
    labels = sorted({label for info in infos for label in info.labels})
    listed = ", ".join(f"{label:g}" for label in labels[:_LISTED])
    listed += f", ... ({len(labels):,} in all)" if len(labels) > _LISTED else ""
    if positive is None:
        if len(labels) > 2:
            raise ConfigurationError(
                f"{path} has more than two labels: {listed}; say with positive=... which are +1"
            )
        return {labels[-1]} if len(labels) == 2 or labels[0] > 0 else set()
    given = positive if isinstance(positive, Collection) else [positive]
    chosen = {float(label) for label in given}
    if not chosen or not chosen <= set(labels):
        raise ConfigurationError(
            f"positive={positive} is not among the labels of {path}; choose from {listed}"
        )
    return chosen


@dataclass(frozen=True)
class _Parts:
    """The parsed blocks of a file: from the cache, or parsed into it."""

    text: LineBlocks
    store: PartStore

    def complete(self, rank: int, world_size: int, progress: Progress | None) -> list[PartInfo]:
        """Make the parts that are missing in the cache; describe all."""
        text, before = self.text, self.text.state()
        fill = self._fill_from_plain if text.seekable else self._fill_from_stream
        count = fill(rank, world_size, progress or (lambda fraction: None))
        if text.state() != before:
            raise ConfigurationError(f"{text.path} changed while it was read; start again")
        infos = [self.store.describe(b) or PartInfo.of(self._obtain(b)) for b in range(count)]
        if not any(info.rows for info in infos):
            raise ConfigurationError(f"{text.path} holds no samples; give an svmlight file")
        return infos

    def _fill_from_plain(self, rank: int, world_size: int, progress: Progress) -> int:
        """Make missing parts: this rank's share, then what the next ranks have not made by then."""
        count = self.text.count
        missing = [block for block in range(count) if self.store.describe(block) is None]
        missing.sort(key=lambda block: ((block - rank) % world_size, block))
        for done, block in enumerate(missing, start=1):
            if self.store.describe(block) is None:
                self.store.write(block, self._parse(block, self.text.read(block)))
            progress(done / len(missing))
        if missing:
            self.store.drop_older()
        return count

    def _fill_from_stream(self, rank: int, world_size: int, progress: Progress) -> int:
        """As ``_fill_from_plain``; each pass reads the whole file, the second only where it must."""
        count = (self.store.noted() or {}).get("blocks")
        for only_share in (True, False):
            if count is not None and all(self.store.describe(block) for block in range(count)):
                break
            count = 0
            for block, lines in enumerate(self.text.stream(progress)):
                count += 1
                turn = block % world_size == rank or not only_share
                if turn and self.store.describe(block) is None:
                    self.store.write(block, self._parse(block, lines))
            self.store.note({"blocks": count})
            self.store.drop_older()
        return count or 0

    def rows(self, starts: list[int], wanted: tuple[int, int]) -> Iterator[Rows]:
        """Cut the rows `[first, stop)` out of the parts that hold them."""
        for block, (start, end) in enumerate(itertools.pairwise(starts)):
            first, stop = max(wanted[0], start), min(wanted[1], end)
            if first < stop:
                yield self._obtain(block).cut(first - start, stop - start)

    def check_indices(self, infos: list[PartInfo], lowest: int, highest: int) -> None:
        """Find the line whose index (as written) is out of range, if a part has one."""
        for block, info in enumerate(infos):
            fits = lowest <= info.lowest + INDEX_BASE and info.highest + INDEX_BASE <= highest
            if info.nonzeros and not fits:
                lines, place = self.text.read(block), self._place(block)
                parse_lines(lines, place=place, lowest=lowest, highest=highest)

    def _obtain(self, block: int) -> Rows:
        return self.store.obtain(block, lambda: self._parse(block, self.text.read(block)))

    def _parse(self, block: int, lines: bytes) -> Rows:
        return parse_block(lines, place=self._place(block))

    def _place(self, block: int) -> Callable[[int], str]:
        return lambda line: f"{self.text.path}:{self.text.lines_before(block) + line + 1}"


# ---- blocks of lines ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LineBlocks:
    r"""A text file cut into blocks of whole lines, so that ranks read different blocks.

    Block b holds the lines that *start* in bytes `[b * block_bytes, (b + 1) * block_bytes)` of the
    (uncompressed) text: every line is in exactly one block, whatever its length.  Compressed files
    are recognised by their first bytes.

    Args:
        path: the file.
        block_bytes: size of a block, in bytes of uncompressed text.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     file.write(b"1 2:3\n0\n1 4:5\n") and file.flush()
        ...     list(LineBlocks(Path(file.name), block_bytes=7).stream())
        [b'1 2:3\n0\n', b'1 4:5\n']
    """

    path: Path
    block_bytes: int

    def __post_init__(self) -> None:
        if self.block_bytes < 1:
            raise ConfigurationError(f"block_bytes {self.block_bytes}; expected at least 1")
        if not self.path.is_file():
            raise ConfigurationError(f"{self.path} is not a file; give the path of a data file")

    def state(self) -> str:
        """Name the state of the file: its size and time."""
        stat = self.path.stat()
        return f"{stat.st_size}-{stat.st_mtime_ns}"

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
            return next(itertools.islice(self.stream(), number, None), b"")
        start, stop = number * self.block_bytes, (number + 1) * self.block_bytes
        with self.path.open("rb") as file:
            if start:
                file.seek(start - 1)
                file.readline()  # a line that starts before belongs to the block before
            return _lines(file, stop - file.tell())

    def stream(self, progress: Progress | None = None) -> Iterator[bytes]:
        """Read the file once and give its blocks in order.

        Args:
            progress: called after every block with the fraction of the file that is read.

        Raises:
            ConfigurationError: the compressed data is damaged.
        """
        position = 0
        whole = max(self.path.stat().st_size, 1)
        with self.path.open("rb") as file, _opened(file) as text:
            for stop in itertools.count(self.block_bytes, self.block_bytes):
                try:
                    block = _lines(text, stop - position)
                except (EOFError, OSError, zlib.error) as error:
                    raise ConfigurationError(
                        f"{self.path} cannot be read past {position:,} bytes of text ({error}); "
                        "check the file"
                    ) from error
                position += len(block)
                if not block and position < stop:
                    return
                if progress:
                    progress(file.tell() / whole)
                yield block

    def lines_before(self, number: int) -> int:
        """Count the lines before a block; reads them all, so only an error message asks for it."""
        return sum(text.count(b"\n") for text in itertools.islice(self.stream(), number))


def _opened(file: IO[bytes]) -> IO[bytes]:
    """Open the text within a file that was opened as bytes."""
    start = file.read(3)
    file.seek(0)
    if start.startswith(_GZIP):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    return cast(IO[bytes], bz2.BZ2File(file)) if start == _BZIP2 else file


def _lines(file: IO[bytes], length: int) -> bytes:
    """Read ``length`` bytes and on to the end of the line; nothing if the last line was longer."""
    text = file.read(max(length, 0))
    return text if not text or text.endswith(b"\n") else text + file.readline()


# ---- parsing --------------------------------------------------------------------------------------


def parse_block(text: bytes, *, place: Callable[[int], str]) -> Rows:
    r"""Parse whole lines; indices are returned less ``INDEX_BASE``, so an index 0 becomes -1.

    Args:
        text: lines, each with its end.
        place: says where a line of this text is (``file:line``), from its 0-based number in it.

    Raises:
        ConfigurationError: a line is malformed; named by ``place``.

    Cost: about 40 MB of text, or 3 million pairs, per second of one core (measured).

    Example:
        >>> rows = parse_block(b"+1 3:0.5 7:1 # first\n-1 1:2\n", place=str)
        >>> rows.labels, rows.indices, rows.values
        (array([ 1., -1.]), array([2, 6, 0], dtype=int32), array([0.5, 1. , 2. ], dtype=float32))
    """
    load = optional("sklearn.datasets").load_svmlight_file
    try:
        matrix, labels = load(io.BytesIO(text), dtype=np.float32, zero_based=True)
    except (ValueError, OverflowError):  # malformed, or an index that it holds in 32 bits
        return parse_lines(text, place=place)
    if not (np.isfinite(matrix.data).all() and np.isfinite(labels).all()):
        return parse_lines(text, place=place)
    pointers = matrix.indptr.astype(np.int64)
    return Rows(labels, pointers, narrowed(matrix.indices - INDEX_BASE), matrix.data)


def parse_lines(
    text: bytes, *, place: Callable[[int], str], lowest: int = 0, highest: float = math.inf
) -> Rows:
    """Parse as ``parse_block`` does, slowly; refuse indices (as written) outside a range.

    Raises:
        ConfigurationError: a line is malformed or has an index out of range.
    """
    rows = []
    for number, line in enumerate(text.split(b"\n")):
        try:
            row = parse_line(line, lowest=lowest, highest=highest)
        except ConfigurationError as error:
            raise ConfigurationError(f"{place(number)}: {error}") from None
        if row:
            rows.append(row)
    indices = [[index - INDEX_BASE for index in row[1]] for row in rows]
    return Rows.of_lists([row[0] for row in rows], indices, [row[2] for row in rows])


def parse_line(
    line: bytes, *, lowest: int = 0, highest: float = math.inf
) -> tuple[float, list[int], list[float]] | None:
    """Parse one line into label, indices (as written) and values; None if it holds no sample.

    Raises:
        ConfigurationError: what was found and what was expected; does not say where.

    Example:
        >>> parse_line(b"-1 qid:4 2:0.5 9:1e-3 # comment")
        (-1.0, [2, 9], [0.5, 0.001])
        >>> parse_line(b"-1 2:0.5 2:1")
        Traceback (most recent call last):
        ...
        sparsync.errors.ConfigurationError: index 2 follows 2; expected ascending indices, each once
    """
    tokens = line.split(b"#", 1)[0].split()
    if not tokens:
        return None
    label = _number(tokens[0], float)
    if label is None or not math.isfinite(label):
        raise ConfigurationError(f"label {_quoted(tokens[0])}; expected a finite number")
    pairs = tokens[1:]
    if pairs and pairs[0].startswith(b"qid") and b":" in pairs[0]:
        del pairs[0]
    indices: list[int] = []
    values: list[float] = []
    for pair in pairs:
        index, value = _parse_pair(pair)
        if not lowest <= index <= highest:
            raise ConfigurationError(
                f"index {index} in {_quoted(pair)}; expected an index "
                + (f"from {lowest} to {highest}" if highest < math.inf else f">= {lowest}")
            )
        if indices and index <= indices[-1]:
            raise ConfigurationError(
                f"index {index} follows {indices[-1]}; expected ascending indices, each once"
            )
        indices.append(index)
        values.append(value)
    return label, indices, values


def _parse_pair(pair: bytes) -> tuple[int, float]:
    left, colon, right = pair.partition(b":")
    index, value = _number(left, int), _number(right, float)
    if not colon or index is None or value is None:
        raise ConfigurationError(f"pair {_quoted(pair)}; expected index:value, such as 17:0.5")
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(value)):
            raise ConfigurationError(
                f"value {_quoted(right)} of index {index}; expected a finite float32"
            )
    return index, value


def _number(token: bytes, kind: Any) -> Any:
    try:
        return kind(token)
    except ValueError:
        return None


def _quoted(token: bytes) -> str:
    text = token.decode(errors="replace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
