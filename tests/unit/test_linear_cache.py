"""The cache of parsed rows: read once, never believed when damaged; and the parser behind it."""

import gzip
import os
import struct
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.errors import ConfigurationError
from sparsync.linear import svmlight
from sparsync.linear.cache import PartStore
from sparsync.linear.rows import Rows
from sparsync.linear.svmlight import LineBlocks, load_shard, parse_block, parse_lines

ARRAYS = ("labels", "indptr", "indices", "values")
load = partial(load_shard, block_bytes=64)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "rows.svm"
    file.write_text("".join(f"{1 - row % 2 * 2} {row + 1}:0.5 {row + 9}:1\n" for row in range(40)))
    return file


def dense(shard):
    return shard.features.toarray().tolist(), shard.labels.tolist()


def refuse_to_parse(monkeypatch):
    monkeypatch.setattr(svmlight, "parse_block", lambda *_, **__: pytest.fail("parsed again"))


def parts_of(path):
    return sorted(path.parent.glob("rows.svm.cache/*/part-*"))


def test_the_second_start_parses_nothing(path, monkeypatch):
    first = dense(load(path))
    refuse_to_parse(monkeypatch)
    assert dense(load(path)) == first
    assert [load(path, rank=r, world_size=3).labels.size for r in range(3)] == [14, 13, 13]


def test_within_a_block_nothing_is_copied(path):
    load_shard(path)
    features = load_shard(path, rank=1, world_size=2).features
    for array in (features.data, features.indices):
        assert not array.flags.writeable and not array.flags.owndata
    assert (features @ np.ones(features.shape[1])).tolist() == [1.5] * 20


def test_a_rank_parses_its_share_and_then_what_nobody_has(path, monkeypatch):
    load(path)
    parts = parts_of(path)
    read = []
    original = LineBlocks.read
    monkeypatch.setattr(LineBlocks, "read", lambda self, n: read.append(n) or original(self, n))
    assert len(parts) > 7
    for number in (0, 1, 2, 5, 7):
        (parts[number] / "part.json").unlink()
    read.clear()
    load(path, rank=1, world_size=4)
    assert read == [1, 5, 2, 7, 0]


@pytest.mark.parametrize("change", ["content", "time", "size"])
def test_a_changed_file_is_parsed_again(path, change):
    first = dense(load(path))
    (before,) = (path.parent / "rows.svm.cache").iterdir()
    text = path.read_text()
    if change != "time":
        path.write_text(text.replace("0.5", "0.7") if change == "content" else text + "1 1:1\n")
    os.utime(path, ns=(0, 1_000_000_007))
    assert (dense(load(path)) == first) == (change == "time")
    (after,) = (path.parent / "rows.svm.cache").iterdir()  # what was made of the old one is gone
    assert after != before


def truncate(file):
    file.write_bytes(file.read_bytes()[:-4])


def flip(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 0x10
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b"")


def overwrite(file):
    file.write_bytes(b"\x93NUMPY or not")


PART = [f"part-00002/{name}" for name in (*(f"{name}.npy" for name in ARRAYS), "part.json")]


@pytest.mark.parametrize("name", [*PART, "source.json"])
@pytest.mark.parametrize("damage", [truncate, flip, empty, overwrite, os.unlink])
def test_a_damaged_cache_is_made_again(path, monkeypatch, name, damage):
    packed = path.with_name("rows.svm.gz")  # only a compressed file's blocks have to be counted
    packed.write_bytes(gzip.compress(path.read_bytes()))
    first = dense(load(packed))
    (folder,) = packed.parent.glob("rows.svm.gz.cache/*")
    damage(folder / name)
    assert dense(load(packed)) == first == dense(load(path))
    refuse_to_parse(monkeypatch)
    assert dense(load(packed)) == first
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_the_cache_may_be_elsewhere(path, tmp_path):
    other = path.with_name("other") / "rows.svm"
    other.parent.mkdir()
    other.write_text("1 1:1\n")
    for file, rows in ((path, 40), (other, 1), (path, 40)):
        assert load(file, cache=tmp_path / "cache").rows_total == rows
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert not path.with_name("rows.svm.cache").exists()


def test_a_cache_that_cannot_be_written_is_named(path, tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(ConfigurationError, match=r"cannot be written .*; name a folder .* cache="):
        load(path, cache=tmp_path / "taken")


def test_the_first_of_two_that_write_a_part_wins(tmp_path):
    rows = Rows.of_lists([1.0], [[3]], [[0.5]])
    stores = [PartStore(tmp_path, state="a", cut="b") for _ in range(2)]
    stores[0].write(0, rows)
    inode = stores[0].path(0).stat().st_ino
    stores[1].write(0, rows)
    assert stores[1].path(0).stat().st_ino == inode
    assert [p.name for p in stores[0].directory.iterdir()] == ["part-00000"]


def test_a_part_that_another_rank_is_removing_is_no_error(tmp_path, monkeypatch):
    rows = Rows.of_lists([1.0], [[3]], [[0.5]])
    store = PartStore(tmp_path, state="a", cut="b")
    store.write(0, rows)
    (store.path(0) / "part.json").unlink()  # first of all; the rest is still there
    monkeypatch.setattr("sparsync.linear.cache._remove", lambda path: None)
    assert store.obtain(0, lambda: rows) is rows
    assert [p.name for p in store.directory.iterdir()] == ["part-00000"]


def test_rows_without_entries_are_kept(tmp_path):
    path = tmp_path / "empty.svm"
    path.write_text("1\n-1\n")
    for _ in range(2):
        shard = load_shard(path)
        assert shard.features.shape == (2, 1) and shard.features.nnz == 0


# ---- the parser -----------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
PAIRS = st.dictionaries(st.integers(0, 2**31 - 2), FLOATS, max_size=6)
GAPS = st.sampled_from([" ", "  ", "\t"])
ENDS = st.sampled_from(["", " ", "\r", " # a comment: 1:2", "#"])


@st.composite
def samples(draw):
    """A line and what it says."""
    label, pairs = draw(FLOATS), sorted(draw(PAIRS).items())
    query = draw(st.sampled_from([[], ["qid:7"]]))
    tokens = [repr(label), *query, *(f"{index}:{value!r}" for index, value in pairs)]
    text = draw(GAPS).join(tokens) + draw(ENDS)
    return text, (label, [i for i, _ in pairs], [v for _, v in pairs])


@given(st.lists(samples()))
def test_both_parsers_say_what_was_written(written):
    text = "".join(f"{line}\n" for line, _ in written).encode()
    labels, indices, values = (
        (list(column) for column in zip(*(s for _, s in written), strict=True))
        if written
        else ([], [], [])
    )
    indices = [[index - 1 for index in row] for row in indices]
    expected = Rows.of_lists(labels, indices, values)
    for parse in (parse_block, parse_lines):
        rows = parse(text, place=str)
        for name in ARRAYS:
            assert np.array_equal(getattr(rows, name), getattr(expected, name)), name
            assert getattr(rows, name).dtype == getattr(expected, name).dtype


TOKENS = st.sampled_from(
    [b"1", b"-1", b"+2", b"1:2", b"2:3", b"3:", b":4", b"0:1", b"-1:1", b"2:nan", b"qid:1", b"qid",
     b"1e9", b"4:1e400", b"inf", b"5:1_0", b"9:0x1", b"7:1:1", b"99999999999:1", b"\xff", b"#", b"\n"]
)  # fmt: skip


@given(st.lists(TOKENS, max_size=9).map(b" ".join))
def test_the_fast_parser_accepts_what_the_slow_one_does(text):
    outcomes = []
    for parse in (parse_block, parse_lines):
        try:
            rows = parse(text, place=lambda line: f"line {line}")
            outcomes.append([getattr(rows, name).tolist() for name in ARRAYS])
        except ConfigurationError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_a_value_is_rounded_once(tmp_path):
    text = b"1 1:0.1 2:16777217 3:1e-46\n"
    rows = parse_block(text, place=str)
    assert rows.values.tolist() == [
        struct.unpack("f", struct.pack("f", v))[0] for v in (0.1, 2.0**24, 0)
    ]
    assert rows.values.tolist() == parse_lines(text, place=str).values.tolist()
