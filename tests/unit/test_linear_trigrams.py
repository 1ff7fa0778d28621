"""Trigrams of sources: a function of the files and the arguments, of nothing else."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from sparsync.errors import ConfigurationError
from sparsync.linear import trigrams
from sparsync.linear.trigrams import drawn_order, hash_trigrams, trigram_shard

DIMENSIONS = 100_003


@pytest.fixture
def root(tmp_path):
    """Two packages and a module; every line tells where it is from."""
    folder = tmp_path / "sources"
    for name, count in (
        ("alpha/a.py", 50),
        ("alpha/inner/b.py", 7),
        ("beta/c.py", 30),
        ("m.py", 20),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name} = {line}\n" for line in range(count)))
    for name in ("site-packages/x/no.py", "alpha/notes.txt", "beta/short.py"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("no" if name.endswith("short.py") else "never read this")
    (folder / "dangling.py").symlink_to(folder / "nowhere.py")
    return folder


@pytest.fixture
def make(root, monkeypatch):
    monkeypatch.setattr(trigrams, "_PART_ROWS", 4)

    def shard(**changed):
        arguments = {"root": root, "lines": 5, "positive": "alpha", "dimensions": DIMENSIONS}
        return trigram_shard(**{**arguments, **changed})

    return shard


def rows_of(shard):
    matrix = shard.features
    entries = [
        (tuple(matrix.indices[a:b]), matrix.data[a:b].tobytes()) for a, b in pairwise(matrix.indptr)
    ]
    return list(zip(entries, shard.labels.tolist(), strict=True))


def test_every_run_of_lines_is_a_sample_with_its_label(make):
    shard = make()
    # 50, 7, 30 and 20 lines, five at a time; two bytes make no trigram
    assert shard.features.shape == (10 + 2 + 6 + 4, DIMENSIONS) and shard.rows_total == 22
    assert Counter(shard.labels.tolist()) == {1.0: 12, -1.0: 10}
    assert shard.labels.dtype == np.float32 and shard.features.dtype == np.float32
    assert np.allclose(shard.features.power(2).sum(axis=1), 1)


@pytest.mark.parametrize("dimensions", [1, 7, 1_000])
def test_columns_that_collide_are_one_entry(make, dimensions):
    matrix = make(dimensions=dimensions).features
    assert matrix.indices.max() < dimensions and np.diff(matrix.indptr).max() <= dimensions
    assert np.allclose(matrix.power(2).sum(axis=1), 1)


def test_the_hash_spreads_trigrams_as_chance_does():
    content = np.frombuffer(bytes(range(32, 127)) * 200, dtype=np.uint8)
    content = content[np.argsort(drawn_order(len(content), seed=1))]
    distinct = len({bytes(content[i : i + 3]) for i in range(len(content) - 2)})
    _, indices, _ = hash_trigrams(content, np.array([0]), np.array([len(content)]), 50_000)
    expected = 50_000 * (1 - (1 - 1 / 50_000) ** distinct)
    assert len(indices) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 30])
def test_shards_together_are_the_whole(make, world_size):
    shards = [make(rank=r, world_size=world_size) for r in range(world_size)]
    assert [row for shard in shards for row in rows_of(shard)] == rows_of(make())
    assert [s.first_row for s in shards] == list(
        np.cumsum([0, *(len(s.labels) for s in shards[:-1])])
    )
    assert {shard.rows_total for shard in shards} == {22}


def test_the_seed_draws_the_order_and_nothing_else(make):
    zero, again, one = rows_of(make()), rows_of(make()), rows_of(make(seed=1))
    assert zero == again != one
    assert Counter(zero) == Counter(one)
    labels = [label for _, label in zero]
    assert labels != sorted(labels) and labels != sorted(labels, reverse=True)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 + 5])
def test_an_order_holds_every_row_once(seed):
    assert sorted(drawn_order(1_000, seed).tolist()) == list(range(1_000))


def test_rows_are_the_first_of_the_order(make):
    assert rows_of(make(rows=9)) == rows_of(make())[:9]
    assert rows_of(make(rows=9, rank=1, world_size=2)) == rows_of(make())[5:9]


def test_without_a_name_packages_are_told_from_modules(make, root):
    assert make(positive=None).labels.tolist().count(1) == 18
    (root / "test").mkdir()
    (root / "test" / "big.py").write_text("x = 1234567890\n" * 500)
    assert make(positive=None).labels.tolist().count(1) == 100


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positive": "gamma"}, "positive='gamma' does not divide .*, such as alpha, beta, m"),
        ({"rows": 23}, "rows 23; .* give 22 samples of 5 lines"),
        ({"rows": 0}, "rows 0"),
        ({"lines": 0}, "lines 0; expected at least 1"),
        ({"dimensions": 2**31}, "dimensions 2147483648; expected 1 to"),
        ({"rank": 1}, "rank 1 of world_size 1"),
    ],
)
def test_what_cannot_be_made_is_refused(make, changed, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**changed)


def test_a_folder_without_sources_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="there is none"):
        trigram_shard(root=tmp_path)


def test_the_hash_is_the_same_everywhere():
    def column(trigram):
        x = int.from_bytes(trigram, "little")
        x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
        x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
        return (x ^ x >> 16) * 3_231_961 >> 32

    text = b"def f(x):\n    return \xff\xfe\xfd\n" * 3
    content = np.frombuffer(text, dtype=np.uint8)
    counts = Counter(column(text[i : i + 3]) for i in range(len(text) - 2))
    _, indices, values = hash_trigrams(content, np.array([0]), np.array([len(text)]), 3_231_961)
    assert indices.tolist() == sorted(counts)
    expected = [np.float32(math.sqrt(counts[i] / (len(text) - 2))) for i in sorted(counts)]
    assert values.tolist() == expected


def test_an_order_follows_the_published_generator():
    # SplitMix64 from 0 starts with e220a8397b1dcdaf, 6e789e6aa1b965f4, 06c45d188009454f, f88bb8a8...
    assert drawn_order(4, seed=0).tolist() == [2, 1, 0, 3]
