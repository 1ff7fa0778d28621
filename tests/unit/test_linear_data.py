"""Test that exactly one rank reads each line, and that source files become trigrams."""

import bz2
import gzip
import importlib
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, count
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from sklearn.datasets import load_svmlight_file

from sparsync.errors import ConfigurationError
from sparsync.published.sparcml import linear
from sparsync.published.sparcml.linear.data import _Blocks, load_shard, row_range
from sparsync.published.sparcml.linear.trigrams import trigram_shard
from tests.tables import cases, refused, refuses

WRITERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}
TIMES = count(10**9)


def lines(number=40, dimensions=50, seed=0):
    generator = np.random.default_rng(seed)
    for row in range(number):
        columns = np.flatnonzero(generator.random(dimensions) < 0.1) + 1
        pairs = " ".join(f"{c}:{generator.normal():.4g}" for c in columns)
        yield f"{generator.choice([-1, 1])} {pairs}" + ("  # a comment" if row % 7 == 0 else "")


@pytest.fixture(autouse=True)
def little_blocks(monkeypatch):
    monkeypatch.setattr(_Blocks, "block_bytes", 60)  # a few lines of the files below


@pytest.fixture
def write(tmp_path):
    """Write lines to a file, as plain text unless the file's name says otherwise."""

    def to(name, text):
        text = text if isinstance(text, bytes) else "".join(f"{line}\n" for line in text).encode()
        path = tmp_path / name
        path.write_bytes(WRITERS[path.suffix if path.suffix in WRITERS else ""](text))
        return path

    return to


def load_all(path, world_size, **arguments):
    load = partial(load_shard, path, world_size=world_size, **arguments)
    shards = [load(rank=rank) for rank in range(world_size)]
    return sparse.vstack([s.features for s in shards]), np.concatenate([s.labels for s in shards])


def assert_same(left, right):
    for name in ("data", "indices", "indptr"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    assert left.shape == right.shape


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("world_size", [1, 3, 50])
def test_the_shards_together_are_what_scikit_learn_reads(write, suffix, world_size):
    path = write(f"rows.svm{suffix}", ["# a heading", "", *lines()])
    features, labels = load_all(path, world_size)
    expected, signs = load_svmlight_file(str(path), dtype=np.float32)
    assert_same(features, sparse.csr_matrix(expected))
    assert np.array_equal(labels, signs)
    assert (features.dtype, features.indices.dtype, labels.dtype) == ("float32", "int32", "float32")


@given(st.integers(0, 200), st.integers(1, 70))
def test_rows_are_contiguous_and_alike_in_number(rows, world_size):
    ranges = [row_range(rows, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [row for first, stop in ranges for row in range(first, stop)] == list(range(rows))
    sizes = {stop - first for first, stop in ranges}
    assert max(sizes) - min(sizes) <= 1


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("blocks") / "text"


@given(st.lists(st.sampled_from(["1 1:2", "-1 3:1 9:4", "", "# 7:1", "1", "2 1:1"]), max_size=12),
       st.integers(1, 40), st.sampled_from(["", ".gz", ".bz2"]))  # fmt: skip
def test_every_line_is_in_one_block(scratch, texts, block_bytes, suffix):
    path = scratch.with_suffix(f".svm{suffix}")
    content = "\n".join([*texts, "1 5:1"]).encode()
    path.write_bytes(WRITERS[suffix](content))
    # makes the file count as changed, whatever the clock's resolution
    os.utime(path, ns=(0, next(TIMES)))
    with patch.object(_Blocks, "block_bytes", block_bytes), _Blocks(path, None) as blocks:
        labels = blocks.complete(0, 1)[1]
    expected = [float(t.split()[0]) for t in texts if t and t[0] != "#"]
    assert np.concatenate(labels).tolist() == [*expected, 1]


# ---- what may be wrong ----------------------------------------------------------------------------


@cases(
    ("yes 1:2", "could not convert string to float: b'yes'"),
    ("nan 1:2", "a label or a value is not finite in float32"),
    ("1 2:1e39", "a label or a value is not finite in float32"),
    ("1 2", "to unpack"),
    ("1 2.0:3", "invalid literal for int"),
    ("1 -3:4", "Invalid index -3"),
    ("1 5:1 3:1", "should be sorted and unique"),
    (f"1 {2**31}:1", "below 2^31"),
)
def test_a_malformed_line_is_named_by_file_and_block(line, message, write):
    path = write("bad.svm", ["1 1:1"] * 12 + [line])
    with pytest.raises(ConfigurationError) as caught:
        load_shard(path)
    said = str(caught.value)
    assert said.startswith(f"{path} cannot be read in bytes 60 to 120 of its text (")
    assert message in said and "expected lines like '1 3:0.5 7:1'" in said and len(said) < 300


@cases(
    ([1, -1], {"dimensions": 1}, "has indices from 1 to 2; expected 1 to 1"),
    ([1, -1], {"dimensions": 0}, "dimensions 0; expected at least 1"),
    ([1, -1], {"rank": 2, "world_size": 2}, "rank 2 of world_size 2; expected 0 <= rank"),
    ([1, -1], {"positive": 3}, "positive=3 is not among the labels of "),
    ([1, -1], {"positive": []}, "choose from -1, 1"),
    ([3, 1, 2], {}, "more than two labels: 1, 2, 3; say with positive"),
    (range(99), {}, "7, 8, 9, ... (99 in all); say"),
    ([], {}, "holds no samples"),
)
def test_what_does_not_fit_the_file_is_refused(labels, arguments, message, write):
    path = write("rows.svm", ["# a comment", "", *(f"{label} 1:1 2:1" for label in labels)])
    with refused(message):
        load_shard(path, **arguments)


def test_a_file_that_is_not_there_or_is_damaged_is_refused(write, tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.svm is not a file"):
        load_shard(tmp_path / "none.svm")
    for suffix, name in ((".gz", "short.svm.gz"), (".bz2", "short.svm.bz2")):
        path = write(name, lines(200))
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ConfigurationError, match=f"svm{suffix} cannot be read"):
            load_shard(path)


def test_a_file_that_changes_while_it_is_read_is_refused(write, monkeypatch):
    path = write("rows.svm", lines())
    parse = _Blocks._parse

    def change(*arguments):
        path.write_bytes(b"1 1:1\n")
        return parse(*arguments)

    monkeypatch.setattr(_Blocks, "_parse", change)
    with pytest.raises(ConfigurationError, match="changed while it was read"):
        load_shard(path)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"scipy.*pip install 'sparsync\[linear\]'"):
        importlib.reload(linear)


# ---- what the file means --------------------------------------------------------------------------


def test_columns_count_from_zero_where_a_zero_is_anywhere_in_the_file(write):
    path = write("zero.svm", [*lines(30), "1 0:9"])
    features = load_shard(path).features
    assert_same(features, sparse.csr_matrix(load_svmlight_file(str(path), dtype=np.float32)[0]))
    assert features[30, 0] == 9
    path = write("one.svm", ["1 1:9", "-1 2:1"])
    assert load_shard(path).features.toarray().tolist() == [[9, 0], [0, 1]]


def test_dimensions_may_exceed_the_largest_index_and_rows_be_empty(write):
    path = write("rows.svm", ["1 1:9", "-1", "1 2:0"])
    assert load_shard(path, dimensions=3_000_000).features.shape == (3, 3_000_000)
    assert load_shard(path).features.shape == (3, 2)
    features = load_shard(write("empty.svm", ["1", "-1"])).features
    assert features.shape == (2, 1) and features.nnz == 0


@cases(
    ([1, 2, 1], None, [-1, 1, -1]),
    ([0, 1, 0], None, [-1, 1, -1]),
    ([-1, 1, 1], -1, [1, -1, -1]),
    ([1, 2, 3], 2, [-1, 1, -1]),
    ([1, 2, 3], (1, 3), [1, -1, 1]),
    ([1, 1], None, [1, 1]),
    ([-1, -1], None, [-1, -1]),
)
def test_positive_says_which_labels_are_plus_one(labels, positive, signs, write):
    path = write("labels.svm", [f"{label} 1:1" for label in labels])
    assert load_shard(path, positive=positive).labels.tolist() == signs


@pytest.mark.slow
def test_ranks_that_start_together_read_the_same(write):
    path = write("rows.svm", lines(400))
    expected, labels = load_all(write("alone.svm", lines(400)), 4)
    with ThreadPoolExecutor(4) as pool:
        load = lambda rank: load_shard(path, rank=rank, world_size=4)  # noqa: E731
        shards = list(pool.map(load, range(4), timeout=60))
    assert_same(sparse.vstack([s.features for s in shards]), expected)
    assert np.array_equal(np.concatenate([s.labels for s in shards]), labels)
    assert [(s.first_row, s.rows_total) for s in shards] == [(100 * rank, 400) for rank in range(4)]


# ---- the cache ------------------------------------------------------------------------------------


def parts_of(path):
    return sorted(path.parent.glob(f"{path.name}.cache/*.npz"))


def dense(path, **arguments):
    shard = load_shard(path, **arguments)
    return shard.features.toarray().tolist(), shard.labels.tolist()


@pytest.fixture
def parsed(monkeypatch):
    """Record the numbers of the blocks that are parsed."""
    numbers, parse = [], _Blocks._parse

    def counted(blocks, number):
        numbers.append(number)
        return parse(blocks, number)

    monkeypatch.setattr(_Blocks, "_parse", counted)
    return numbers


@pytest.mark.parametrize("suffix", WRITERS)
def test_the_second_start_parses_nothing(write, parsed, suffix):
    path = write(f"rows.svm{suffix}", lines())
    first = dense(path)
    assert parsed == list(range(len(parts_of(path))))
    parsed.clear()
    assert dense(path) == first and len(dense(path, rank=1, world_size=3)[1]) == 13 and not parsed


def test_a_rank_parses_its_share_and_then_what_nobody_has(write, parsed):
    path = write("rows.svm", lines())
    dense(path)
    parts = parts_of(path)
    assert len(parts) > 7
    for number in (0, 1, 2, 5, 7):
        parts[number].unlink()
    parsed.clear()
    dense(path, rank=1, world_size=4)
    assert parsed == [1, 5, 2, 7, 0]


@pytest.mark.parametrize("change", ["content", "time", "size"])
def test_a_changed_file_is_parsed_again(write, change):
    path = write("rows.svm", lines())
    first, before, text = dense(path), parts_of(path), path.read_text()
    if change != "time":
        path.write_text(text.replace(":0.", ":1.") if change == "content" else text + "1 1:1\n")
    os.utime(path, ns=(0, 1_000_000_007))
    assert (dense(path) == first) == (change == "time")
    assert not {*before} & {*parts_of(path)}  # the cache of the old file is gone


def test_a_damaged_cache_is_never_believed(write):
    path = write("rows.svm", lines())
    first, damaged = dense(path), parts_of(path)[2]
    whole = damaged.read_bytes()
    places = range(5, 1400, 60)
    flipped = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in places]
    for content in (*flipped, whole[:-4], b""):
        damaged.write_bytes(content)
        assert dense(path) == first
    damaged.unlink()
    assert dense(path) == first


def test_a_block_that_is_damaged_while_it_is_used_is_parsed_again(write, monkeypatch):
    path = write("rows.svm", lines())
    first, read = dense(path), _Blocks._cached

    def without_values(blocks, number, *names):
        return None if "values" in names else read(blocks, number, *names)

    monkeypatch.setattr(_Blocks, "_cached", without_values)
    assert dense(path) == first


def test_the_cache_may_be_elsewhere(write, tmp_path):
    path = write("rows.svm", lines())
    other = tmp_path / "other" / "rows.svm"
    other.parent.mkdir()
    other.write_text("1 1:1\n")
    for file, rows in ((path, 40), (other, 1), (path, 40)):
        assert load_shard(file, cache=tmp_path / "cache").rows_total == rows
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert not path.with_name("rows.svm.cache").exists()


def test_a_cache_that_cannot_be_written_is_named(write, tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    with refused("cannot be written ", "; give a writable folder with cache="):
        load_shard(write("rows.svm", lines()), cache=tmp_path / "taken")


DIMENSIONS = 100_003


@pytest.fixture
def root(tmp_path):
    """Make two packages and a module, in which every line shows its origin."""
    folder = tmp_path / "sources"
    numbers = {"alpha/a.py": 50, "alpha/inner/b.py": 7, "beta/c.py": 30, "m.py": 20}
    files = {name: "".join(f"{name} = {i}\n" for i in range(n)) for name, n in numbers.items()}
    files |= dict.fromkeys(("site-packages/x/no.py", "alpha/notes.txt"), "never read this")
    for name, text in {**files, "beta/short.py": "no"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "dangling.py").symlink_to(folder / "nowhere.py")
    return folder


@pytest.fixture
def make(root, monkeypatch):
    monkeypatch.setattr("sparsync.published.sparcml.linear.trigrams._LINES", 5)

    def shard(**changed):
        arguments = {"root": root, "positive": "alpha", "dimensions": DIMENSIONS}
        return trigram_shard(**{**arguments, **changed})

    return shard


def rows_of(shard):
    labelled = zip(shard.features, shard.labels.tolist(), strict=True)
    return [(tuple(row.indices), row.data.tobytes(), label) for row, label in labelled]


def test_every_run_of_lines_is_a_sample_with_its_label(make):
    shard = make()
    # 50, 7, 30 and 20 lines make a sample per five lines; two bytes have no trigram
    assert shard.features.shape == (10 + 2 + 6 + 4, DIMENSIONS) and shard.rows_total == 22
    assert Counter(shard.labels.tolist()) == {1.0: 12, -1.0: 10}
    assert shard.labels.dtype == np.float32 and shard.features.dtype == np.float32
    assert shard.features.indices.dtype == np.int32 and shard.features.has_sorted_indices


@pytest.mark.parametrize("dimensions", [7, DIMENSIONS])
def test_an_entry_is_the_root_of_a_trigrams_share(tmp_path, dimensions):
    text = "def f(x):\n    return \xff\xfe\xfd\n"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.py").write_bytes(text.encode("latin-1"))
    (tmp_path / "b.py").write_text("pass")
    shard = trigram_shard(root=tmp_path, dimensions=dimensions, positive="a")
    row = shard.features[int(shard.labels.argmax())]
    blank = text.replace("\n    ", " ")
    shares = Counter(blank[i : i + 3] for i in range(len(blank) - 2))
    if dimensions == DIMENSIONS:
        expected = [(times / (len(blank) - 2)) ** 0.5 for times in shares.values()]
        assert sorted(row.data) == pytest.approx(sorted(expected))
    assert row.indices.max() < dimensions and row.power(2).sum() == pytest.approx(1)


@pytest.mark.parametrize("world_size", [2, 7, 30])
def test_shards_together_are_the_whole(make, world_size):
    shards = [make(rank=r, world_size=world_size) for r in range(world_size)]
    assert [row for shard in shards for row in rows_of(shard)] == rows_of(make())
    starts = accumulate((len(shard.labels) for shard in shards[:-1]), initial=0)
    assert [shard.first_row for shard in shards] == [*starts]
    assert {shard.rows_total for shard in shards} == {22}


def test_the_order_is_random_but_always_the_same(make):
    rows = rows_of(make())
    assert rows == rows_of(make())
    labels = [label for *_, label in rows]
    assert labels != sorted(labels) and labels != sorted(labels, reverse=True)
    assert rows_of(make(rows=9)) == rows[:9]  # the first of the order
    assert rows_of(make(rows=9, rank=1, world_size=2)) == rows[5:9]


def test_without_a_name_packages_are_told_from_modules(make, root):
    assert make(positive=None).labels.tolist().count(1) == 18
    (root / "test").mkdir()
    (root / "test" / "big.py").write_text("x = 1234567890\n" * 500)
    assert make(positive=None).labels.tolist().count(1) == 100


@refuses(
    ({"positive": "gamma"}, "positive='gamma' does not divide .*, such as alpha, beta, m"),
    ({"rows": 23}, "rows 23; .* give 22: ask for no more"),
    ({"rows": 0}, "rows 0"),
    ({"dimensions": 2**31}, "dimensions 2147483648; expected 1 to"),
    ({"rank": 1}, "rank 1 of world_size 1"),
)
def test_what_cannot_be_made_is_refused(changed, make):
    make(**changed)


def test_a_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="there is none"):
        trigram_shard(root=tmp_path)
