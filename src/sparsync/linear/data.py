"""Data for linear models: every rank loads its rows of a file, or of the trigrams.

::

    file --blocks--> lines --svmlight--> rows --cache--> parts on disk --cut--> this rank's Shard
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from sparsync.errors import ConfigurationError
from sparsync.linear.blocks import LineBlocks
from sparsync.linear.cache import PartInfo, PartStore
from sparsync.linear.rows import Rows
from sparsync.linear.shard import Shard, row_range
from sparsync.linear.svmlight import INDEX_BASE, parse_block, parse_lines
from sparsync.linear.trigrams import trigram_shard

__all__ = ["Shard", "load_shard", "trigram_shard"]

_LISTED = 10  # labels that a message lists


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
    progress: Callable[[float], None] | None = None,
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
        cache: folder for the cache; default: ``<source>.cache`` beside the file.
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
    store = _store(text, cache)
    infos = _complete(text, store, rank, world_size, progress)
    base = _index_base(infos, zero_based)
    needed = max((info.highest for info in infos), default=0) + INDEX_BASE - base + 1
    width = max(needed, 1) if dimensions is None else dimensions
    _check_indices(text, infos, base, width)

    starts = np.cumsum([0, *(info.rows for info in infos)]).tolist()
    own = row_range(starts[-1], rank=rank, world_size=world_size)
    rows = Rows.join(list(_rows(text, store, starts, own)))
    return Shard(
        features=rows.to_csr(width, shift=INDEX_BASE - base),
        labels=_signs(rows.labels, _positive(infos, positive, text.path)),
        rows_total=starts[-1],
        first_row=own[0],
    )


def _store(text: LineBlocks, cache: Path | None) -> PartStore:
    name = text.path.name
    folder = text.path.with_name(f"{name}.cache")
    if cache is not None:  # which may hold the caches of many files
        whole = str(text.path.resolve()).encode(errors="surrogateescape")
        folder = Path(cache) / f"{name}-{zlib.crc32(whole):08x}"
    return PartStore(folder, state=_state(text.path), cut=str(text.block_bytes))


def _state(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def _complete(
    text: LineBlocks,
    store: PartStore,
    rank: int,
    world_size: int,
    progress: Callable[[float], None] | None,
) -> list[PartInfo]:
    """Make the parts that are missing in the cache; describe all."""
    before = _state(text.path)
    fill = _fill_from_plain if text.seekable else _fill_from_stream
    count = fill(text, store, rank, world_size, progress)
    if _state(text.path) != before:
        raise ConfigurationError(f"{text.path} changed while it was read; start again")
    infos = [
        store.describe(block) or PartInfo.of(_part(text, store, block)) for block in range(count)
    ]
    if not any(info.rows for info in infos):
        raise ConfigurationError(f"{text.path} holds no samples; give an svmlight file")
    return infos


def _fill_from_plain(
    text: LineBlocks,
    store: PartStore,
    rank: int,
    world_size: int,
    progress: Callable[[float], None] | None,
) -> int:
    """Make missing parts: this rank's share, then what the next ranks have not made by then."""
    missing = [block for block in range(text.count) if store.describe(block) is None]
    missing.sort(key=lambda block: ((block - rank) % world_size, block))
    for done, block in enumerate(missing, start=1):
        if store.describe(block) is None:
            store.write(block, _parse(text, block, text.read(block)))
        if progress:
            progress(done / len(missing))
    if missing:
        store.drop_older()
    return text.count


def _fill_from_stream(
    text: LineBlocks,
    store: PartStore,
    rank: int,
    world_size: int,
    progress: Callable[[float], None] | None,
) -> int:
    """As ``_fill_from_plain``; each pass reads the whole file, the second only where it must."""
    count = (store.noted() or {}).get("blocks")
    for only_share in (True, False):
        if count is not None and all(store.describe(block) for block in range(count)):
            break
        count = 0
        for block, lines in enumerate(text.stream(progress)):
            count += 1
            turn = block % world_size == rank or not only_share
            if turn and store.describe(block) is None:
                store.write(block, _parse(text, block, lines))
        store.note({"blocks": count})
        store.drop_older()
    return count or 0


def _parse(text: LineBlocks, block: int, lines: bytes) -> Rows:
    return parse_block(lines, place=_place(text, block))


def _place(text: LineBlocks, block: int) -> Callable[[int], str]:
    return lambda line: f"{text.path}:{text.lines_before(block) + line + 1}"


def _part(text: LineBlocks, store: PartStore, block: int) -> Rows:
    return store.obtain(block, lambda: _parse(text, block, text.read(block)))


def _rows(
    text: LineBlocks, store: PartStore, starts: list[int], wanted: tuple[int, int]
) -> Iterator[Rows]:
    """Cut the rows `[first, stop)` out of the parts that hold them."""
    for block, (start, end) in enumerate(itertools.pairwise(starts)):
        first, stop = max(wanted[0], start), min(wanted[1], end)
        if first < stop:
            yield _part(text, store, block).cut(first - start, stop - start)


# ---- what the indices and labels of the whole file mean -------------------------------------------


def _index_base(infos: list[PartInfo], zero_based: bool | Literal["auto"]) -> int:
    if zero_based == "auto":
        return 0 if any(info.lowest < 0 for info in infos) else 1
    return 0 if zero_based else 1


def _check_indices(text: LineBlocks, infos: list[PartInfo], base: int, width: int) -> None:
    """Find the line whose index is out of range, if a part has one."""
    if width < 1:
        raise ConfigurationError(f"dimensions {width}; expected at least 1")
    lowest, highest = base, base + width - 1  # as written in the file
    for block, info in enumerate(infos):
        if info.nonzeros and not (
            lowest <= info.lowest + INDEX_BASE and info.highest + INDEX_BASE <= highest
        ):
            lines, place = text.read(block), _place(text, block)
            parse_lines(lines, place=place, lowest=lowest, highest=highest)


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
    chosen = {
        float(label) for label in (positive if isinstance(positive, Collection) else [positive])
    }
    if not chosen or not chosen <= set(labels):
        raise ConfigurationError(
            f"positive={positive} is not among the labels of {path}; choose from {listed}"
        )
    return chosen


def _signs(labels: np.ndarray, positive: set[float]) -> np.ndarray:
    return np.where(np.isin(labels, sorted(positive)), 1, -1).astype(np.float32)
