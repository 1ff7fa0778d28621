"""Build a data set from files that every Python has: trigrams in the standard library's sources."""

from __future__ import annotations

import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import require
from sparsync.published.sparcml.linear.data import Shard, row_range

__all__ = ["URL_DIMENSIONS", "trigram_shard"]

URL_DIMENSIONS = 3_231_961  # columns of the URL data set (SparCML, Table 1)

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_LINES = 16  # lines per sample
_SHORTEST = 3  # characters in a trigram
_MAX_DIMENSIONS = (1 << 31) - 1  # columns are int32
# smallest fraction of samples from ``test``, because some systems ship only a stub of it
_FAIR_SHARE = 0.2


def trigram_shard(
    *,
    dimensions: int = URL_DIMENSIONS,
    rank: int = 0,
    world_size: int = 1,
    rows: int | None = None,
    positive: str | None = None,
    root: Path | None = None,
) -> Shard:
    """Return this rank's rows of the trigram data set; a rank hashes only its own rows.

    The data set has the shape of URL and Webspam (millions of columns, a few hundred entries per row),
    but needs no download.  A sample consists of consecutive lines from one file; its label depends on
    the package.  If a trigram occurs c times among the n trigrams of its sample, its entry is
    sqrt(c / n), so rows have length 1.  Consecutive whitespace counts as one blank.  Rows are in random
    order, the same on every rank, so shards have similar distributions.

    Args:
        dimensions: number of columns into which trigrams are hashed.
        rank: this rank.
        world_size: number of ranks; may exceed the number of rows.
        rows: use only this many rows, from the start of the random order; default: all rows.
        positive: name of the top-level package or module whose lines are +1.  Default: ``test``, which
            has about half of all lines; if it is not shipped, all packages (modules are -1).
        root: folder of the sources; default: this Python's standard library.

    Raises:
        ConfigurationError: there are fewer than ``rows`` rows, or none from ``positive``.

    Cost: reading the sources (30 MB), then hashing about a million trigrams per second.

    Example:
        >>> shard = trigram_shard(rows=1_000, rank=1, world_size=4)
        >>> shard.features.shape, shard.first_row, sorted(set(shard.labels.tolist()))
        ((250, 3231961), 250, [-1.0, 1.0])
    """
    most = _MAX_DIMENSIONS
    require(1 <= dimensions <= most, f"dimensions {dimensions}; expected 1 to {most:,}")
    root = root or Path(sysconfig.get_path("stdlib"))
    texts, is_positive = _samples(root, positive)
    total = len(texts) if rows is None else rows
    require(
        0 < total <= len(texts),
        f"rows {total}; the sources in {root} give {len(texts):,}: ask for no more",
    )
    first, stop = row_range(total, rank=rank, world_size=world_size)
    mine = np.random.default_rng(0).permutation(len(texts))[first:stop]
    labels = np.where(is_positive[mine], 1, -1).astype(np.float32)
    return Shard(_hashed([texts[i] for i in mine], dimensions), labels, total, first)


def _samples(root: Path, positive: str | None) -> tuple[list[bytes], np.ndarray]:
    """Read all sources in the order of their paths; return all samples, and their labels."""
    texts: list[bytes] = []
    names: list[str] = []  # top-level package or module of each text
    packages: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _INSTALLED.isdisjoint(parts):
            continue
        try:
            text = path.read_bytes().splitlines(keepends=True)
        except OSError:  # skip files that cannot be read, e.g. dangling links
            continue
        runs = [b"".join(text[start : start + _LINES]) for start in range(0, len(text), _LINES)]
        runs = [run for run in runs if len(run.strip()) >= _SHORTEST]
        name = parts[0].removesuffix(".py")
        texts += runs
        names += [name] * len(runs)
        if len(parts) > 1:
            packages.add(name)
    sizes = Counter(names)
    if positive is None and sizes["test"] < _FAIR_SHARE * len(names):
        chosen = packages
    else:
        chosen = {positive or "test"}
    is_positive = np.isin(names, list(chosen))
    largest = [name for name, _ in sizes.most_common(5) if name not in chosen]
    require(
        0 < int(is_positive.sum()) < len(is_positive),
        f"positive={positive!r} does not divide the sources in {root}; choose a "
        f"package or module there, such as {', '.join(largest) or '(there is none)'}",
    )
    return texts, is_positive


def _hashed(texts: list[bytes], dimensions: int) -> csr_matrix:
    from sklearn.feature_extraction.text import HashingVectorizer  # type: ignore[import-untyped, unused-ignore]  # takes a second

    if not texts:
        return csr_matrix((0, dimensions), dtype=np.float32)
    vectorizer = HashingVectorizer(
        encoding="latin-1",  # it decodes any bytes
        analyzer="char",
        ngram_range=(3, 3),
        lowercase=False,
        n_features=dimensions,
        alternate_sign=False,
        norm="l1",
        dtype=np.float32,
    )
    features = vectorizer.transform(texts)
    np.sqrt(features.data, out=features.data)
    return features
