"""Files of sparse rows: every line read once, by one rank, or named with what is wrong with it."""

import bz2
import gzip
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from sklearn.datasets import load_svmlight_file

from sparsync.errors import ConfigurationError
from sparsync.linear import svmlight
from sparsync.linear.rows import optional, row_range
from sparsync.linear.svmlight import LineBlocks, load_shard

WRITERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}
BLOCK = 60  # bytes: a few lines of the files below


def lines(count=40, dimensions=50, seed=0):
    generator = np.random.default_rng(seed)
    for number in range(count):
        columns = np.flatnonzero(generator.random(dimensions) < 0.1) + 1
        pairs = " ".join(f"{c}:{generator.normal():.4g}" for c in columns)
        yield f"{generator.choice([-1, 1])} {pairs}" + ("  # a comment" if number % 7 == 0 else "")


@pytest.fixture
def write(tmp_path):
    """Write lines to a file; plain unless its name says otherwise."""

    def to(name, text):
        text = text if isinstance(text, bytes) else "".join(f"{line}\n" for line in text).encode()
        path = tmp_path / name
        path.write_bytes(WRITERS[path.suffix if path.suffix in WRITERS else ""](text))
        return path

    return to


def load_all(path, world_size, **arguments):
    shards = [
        load_shard(path, rank=r, world_size=world_size, **arguments) for r in range(world_size)
    ]
    return sparse.vstack([s.features for s in shards]), np.concatenate([s.labels for s in shards])


def assert_same(left, right):
    for name in ("data", "indices", "indptr"):
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    assert left.shape == right.shape


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 50])
def test_the_shards_together_are_what_scikit_learn_reads(write, suffix, world_size):
    path = write(f"rows.svm{suffix}", ["# a heading", "", *lines()])
    features, labels = load_all(path, world_size, block_bytes=BLOCK)
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


@given(st.lists(st.text("01 :#\r", max_size=12)), st.integers(1, 40))
def test_every_line_is_in_one_block(scratch, texts, block_bytes):
    content = "\n".join(texts).encode()
    scratch.write_bytes(content)
    blocks = LineBlocks(scratch, block_bytes)
    read = [blocks.read(number) for number in range(blocks.count)]
    assert b"".join(read) == content
    assert blocks.seekable and list(blocks.stream()) == read[: len(list(blocks.stream()))]
    for number, text in enumerate(read):
        start = sum(map(len, read[:number]))
        assert blocks.lines_before(number) == content[:start].count(b"\n")
        if text:
            assert start == 0 or content[start - 1 : start] == b"\n"
            last_line = start + 1 + text[:-1].rfind(b"\n")
            assert start // block_bytes == number and last_line // block_bytes <= number


@given(st.lists(st.text("01 :#\r", max_size=12)), st.integers(1, 40))
def test_a_compressed_file_has_the_same_blocks(scratch, texts, block_bytes):
    content = "\n".join(texts).encode()
    scratch.write_bytes(content)
    plain = list(LineBlocks(scratch, block_bytes).stream())
    for compress in (gzip.compress, bz2.compress):
        scratch.write_bytes(compress(content))
        blocks = LineBlocks(scratch, block_bytes)
        assert not blocks.seekable and list(blocks.stream()) == plain
        last = len(plain) - 1
        assert blocks.read(last + 1) == b"" and (not plain or blocks.read(last) == plain[last])


# ---- what may be wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yes 1:2", "label 'yes'; expected a finite number"),
        ("1:2 3:4", "label '1:2'"),
        ("nan 1:2", "label 'nan'"),
        ("1 2", "pair '2'; expected index:value"),
        ("1 2:", "pair '2:'"),
        ("1 :2", "pair ':2'"),
        ("1 2:3:4", "pair '2:3:4'"),
        ("1 2.0:3", "pair '2.0:3'"),
        ("1 -3:4", "index -3 in '-3:4'; expected an index >= 0"),
        ("1 5:1 3:1", "index 3 follows 5; expected ascending indices, each once"),
        ("1 5:1 5:1", "index 5 follows 5"),
        ("1 2:nan", "value 'nan' of index 2; expected a finite float32"),
        ("1 2:-inf", "value '-inf'"),
        ("1 2:1e39", "value '1e39'"),
        ("1 2:" + "x" * 900, "xxx...'; expected index:value"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(write, suffix, line, message):
    path = write(f"bad.svm{suffix}", [*lines(16), line, *lines(5)])
    with pytest.raises(ConfigurationError) as caught:
        load_shard(path, block_bytes=BLOCK)
    assert str(caught.value).startswith(f"{path}:17: ") and message in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dimensions": 4}, ":2: index 5 in '5:1'; expected an index from 1 to 4"),
        (
            {"dimensions": 5, "zero_based": True},
            ":2: index 5 in '5:1'; expected an index from 0 to 4",
        ),
        ({"dimensions": 0}, "dimensions 0; expected at least 1"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2; expected 0 <= rank < world_size"),
        ({"block_bytes": 0}, "block_bytes 0; expected at least 1"),
        ({"zero_based": "Auto"}, "zero_based='Auto'; expected True, False or 'auto'"),
        ({"positive": 3}, "positive=3 is not among the labels of "),
        ({"positive": []}, "choose from -1, 1"),
    ],
)
def test_what_does_not_fit_the_file_is_refused(write, arguments, message):
    path = write("rows.svm", ["1 1:1 2:1", "-1 5:1"])
    with pytest.raises(ConfigurationError) as caught:
        load_shard(path, **arguments)
    assert message in str(caught.value)


def test_an_index_of_zero_in_a_file_that_counts_from_one_is_refused(write):
    path = write("rows.svm", ["1 1:1", "-1 0:1"])
    with pytest.raises(
        ConfigurationError, match="svm:2: index 0 in '0:1'; expected an index from 1"
    ):
        load_shard(path, zero_based=False)


@pytest.mark.parametrize("text", [b"", b"\n\n", b"# nothing but a comment\n"])
def test_a_file_without_samples_is_refused(write, text):
    with pytest.raises(ConfigurationError, match="holds no samples"):
        load_shard(write("empty.svm", text))


def test_a_file_that_is_not_there_or_is_damaged_is_refused(write, tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.svm is not a file"):
        load_shard(tmp_path / "none.svm")
    for suffix, name in ((".gz", "short.svm.gz"), (".bz2", "short.svm.bz2")):
        path = write(name, lines(200))
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ConfigurationError, match=f"svm{suffix} cannot be read past"):
            load_shard(path)


def test_a_file_that_changes_while_it_is_read_is_refused(write, monkeypatch):
    path = write("rows.svm", lines())
    parse = svmlight.parse_block

    def change(text, **named):
        path.write_bytes(b"1 1:1\n")
        return parse(text, **named)

    monkeypatch.setattr(svmlight, "parse_block", change)
    with pytest.raises(ConfigurationError, match="changed while it was read"):
        load_shard(path)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ConfigurationError, match=r"need scipy.*pip install 'sparsync\[linear\]'"):
        optional("scipy.sparse")


# ---- what the file means --------------------------------------------------------------------------


def test_columns_count_from_zero_where_a_zero_is_anywhere_in_the_file(write):
    path = write("zero.svm", [*lines(30), "1 0:9"])
    features = load_shard(path, block_bytes=BLOCK).features
    assert_same(features, sparse.csr_matrix(load_svmlight_file(str(path), dtype=np.float32)[0]))
    assert features[30, 0] == 9
    path = write("one.svm", ["1 1:9", "-1 2:1"])
    assert load_shard(path).features.toarray().tolist() == [[9, 0], [0, 1]]
    assert load_shard(path, zero_based=True).features.toarray().tolist() == [[0, 9, 0], [0, 0, 1]]


def test_dimensions_may_exceed_the_largest_index(write):
    path = write("rows.svm", ["1 1:9", "-1", "1 2:0"])
    assert load_shard(path, dimensions=3_000_000).features.shape == (3, 3_000_000)
    assert load_shard(path).features.shape == (3, 2)


def test_indices_beyond_32_bits(write):
    shard = load_shard(write("wide.svm", [f"1 1:2 {2**31}:3", f"-1 {2**40}:1"]))
    assert shard.features.shape == (2, 2**40)
    assert shard.features.indices.tolist() == [0, 2**31 - 1, 2**40 - 1]


@pytest.mark.parametrize(
    ("labels", "positive", "signs"),
    [
        ([1, 2, 1], None, [-1, 1, -1]),
        ([0, 1, 0], None, [-1, 1, -1]),
        ([-1, 1, 1], -1, [1, -1, -1]),
        ([1, 2, 3], 2, [-1, 1, -1]),
        ([1, 2, 3], (1, 3), [1, -1, 1]),
        ([1, 1], None, [1, 1]),
        ([-1, -1], None, [-1, -1]),
    ],
)
def test_positive_says_which_labels_are_plus_one(write, labels, positive, signs):
    path = write("labels.svm", [f"{label} 1:1" for label in labels])
    assert load_shard(path, positive=positive).labels.tolist() == signs


def test_more_than_two_labels_are_listed(write):
    path = write("labels.svm", [f"{label} 1:1" for label in (3, 1, 2)])
    with pytest.raises(
        ConfigurationError, match=r"more than two labels: 1, 2, 3; say with positive"
    ):
        load_shard(path)
    path = write("many.svm", [f"{label} 1:1" for label in range(99)])
    with pytest.raises(ConfigurationError, match=r"7, 8, 9, \.\.\. \(99 in all\); say"):
        load_shard(path)


def test_ranks_that_start_together_read_the_same(write):
    path = write("rows.svm", lines(400))
    expected, labels = load_all(write("alone.svm", lines(400)), 4)
    with ThreadPoolExecutor(4) as pool:
        load = lambda rank: load_shard(path, rank=rank, world_size=4, block_bytes=BLOCK)  # noqa: E731
        shards = list(pool.map(load, range(4), timeout=60))
    assert_same(sparse.vstack([s.features for s in shards]), expected)
    assert np.array_equal(np.concatenate([s.labels for s in shards]), labels)
    assert [(s.first_row, s.rows_total) for s in shards] == [(100 * rank, 400) for rank in range(4)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_progress_runs_to_one(write, suffix):
    path = write(f"rows.svm{suffix}", lines())
    seen = []
    load_shard(path, block_bytes=BLOCK, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1 and len(seen) > 3
    load_shard(path, block_bytes=BLOCK, progress=seen.clear)  # called, it would fail
