"""Trigrams of sources: a function of the files and the arguments, of nothing else."""

from collections import Counter

import numpy as np
import pytest

from sparsync.errors import ConfigurationError
from sparsync.linear.trigrams import trigram_shard

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
def make(root):
    def shard(**changed):
        arguments = {"root": root, "lines": 5, "positive": "alpha", "dimensions": DIMENSIONS}
        return trigram_shard(**{**arguments, **changed})

    return shard


def rows_of(shard):
    return [
        (tuple(row.indices), row.data.tobytes(), label)
        for row, label in zip(shard.features, shard.labels.tolist(), strict=True)
    ]


def test_every_run_of_lines_is_a_sample_with_its_label(make):
    shard = make()
    # 50, 7, 30 and 20 lines, five at a time; two bytes make no trigram
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
    assert [s.first_row for s in shards] == list(
        np.cumsum([0, *(len(s.labels) for s in shards[:-1])])
    )
    assert {shard.rows_total for shard in shards} == {22}


def test_the_seed_draws_the_order_and_nothing_else(make):
    zero, one = rows_of(make()), rows_of(make(seed=1))
    assert zero == rows_of(make()) != one
    assert Counter(zero) == Counter(one)
    labels = [label for *_, label in zero]
    assert labels != sorted(labels) and labels != sorted(labels, reverse=True)
    assert rows_of(make(rows=9)) == zero[:9]  # the first of the order
    assert rows_of(make(rows=9, rank=1, world_size=2)) == zero[5:9]


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
