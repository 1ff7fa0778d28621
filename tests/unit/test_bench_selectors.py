"""Test rows, ratios, tables, the picture and the command of ``sparsync bench --selectors``."""

import dataclasses
import json

import pytest
import torch

from sparsync.cli.bench import selection_time
from sparsync.cli.bench.selection_time import (
    DEFAULT_SIZES,
    SELECTOR_INPUTS,
    SelectorSettings,
    parse_sizes,
    selector_tables,
)

from .consoles import shown

ORDER = ["torch.topk of |x|", "exact, no sort of n", "trimmed", "binary search"]
ORDER += ["binary search, 1 of 5", "sampled", "exact + x.add_, fused", "x.add_(gradient)"]
ORDER += ["one read, x.sum()"]


def measure(sizes=(4 << 10,), **options):
    return selection_time.bench_selectors(SelectorSettings(sizes, 0.01, seconds=0, **options))


@pytest.mark.parametrize("kind", SELECTOR_INPUTS)
def test_every_selector_is_measured_at_every_size_smallest_first(kind):
    torch.set_num_threads(2)
    try:
        rows = measure((16 << 10, 4 << 10, 4 << 10), input=kind)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert [row.selector for row in rows] == ORDER * 2
    assert [row.size for row in rows] == [1024] * len(ORDER) + [4096] * len(ORDER)
    assert {row.k for row in rows} == {10, 41}
    assert all(row.correct and row.seconds > 0 and row.samples == 3 for row in rows)
    for row in rows:
        if "x." in row.selector and "fused" not in row.selector:
            assert row.entries_over_k is row.recall is None
        elif row.selector.startswith("binary search"):
            assert 1 <= row.entries_over_k <= 2 and row.recall == 1
        elif row.selector != "sampled":
            assert row.entries_over_k == row.recall == 1
    for group in (rows[: len(ORDER)], rows[len(ORDER) :]):
        assert group[0].speedup == group[-1].over_read == 1
        for row in group:
            assert row.speedup == group[0].seconds / row.seconds
            assert row.over_read == row.seconds / group[-1].seconds


def test_preparation_is_not_timed():
    times = iter([5.0, 6.0, 20.0, 24.0])
    calls = []
    noted = (lambda letter=letter: calls.append(letter) for letter in "pr")
    measured = selection_time._Line("", *noted, period=2)
    measured.sample(lambda: (calls.append("t"), next(times))[1])
    assert calls == list("ptrtptrt")
    assert measured.samples == [(1.0 + 4.0) / 2]


def test_missing_entries_are_noted():
    values = torch.tensor([5.0, 3.0, 1.0])
    assert selection_time._judge(torch.tensor([5.0, -4.0, 3.0, 1.0]), 2, values) == (1.5, 0.5)


def test_the_table_has_ratios_first_and_says_what_is_wrong():
    rows = measure()
    rows[1] = dataclasses.replace(rows[1], correct=False)
    eight = [dataclasses.replace(r, nbytes=n) for n in parse_sizes(DEFAULT_SIZES) for r in rows]
    text = shown(selector_tables(eight))
    assert text.index("faster than torch.topk") < text.index("over k") < text.index("ms per call")
    wrong = [line.strip().split("  ")[0] for line in text.splitlines() if "WRONG" in line]
    assert set(wrong) == {"exact, no sort of n"}
    assert "512" in text and "…" not in text


# ---- the command ----------------------------------------------------------------------------------


def test_the_json_has_the_documented_keys(command, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        "sparsync.cli.bench.command.bench_selectors",
        lambda settings: selection_time.bench_selectors(dataclasses.replace(settings, seconds=0)),
    )
    files = tmp_path / "new" / "s.json", tmp_path / "selectors.png"
    options = ["--sizes", "16KB,64KB", "--json", files[0], "--plot", files[1]]
    code, out, err = command("bench", "--selectors", *options)
    assert (code, err) == (0, "")
    rows = json.loads(files[0].read_text())
    assert [row["selector"] for row in rows] == ORDER * 2
    for row in rows:
        assert list(row) == [field.name for field in dataclasses.fields(selection_time.SelectorRow)]
        assert (row["density"], row["input"], row["device"]) == (0.001, "uniform", "cpu")
    assert "16 KB" in out and "64 KB" in out and "trimmed" in out
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_a_wrong_selection_ends_with_1(command, monkeypatch):
    wrong = dataclasses.replace(measure()[0], correct=False)
    monkeypatch.setattr("sparsync.cli.bench.command.bench_selectors", lambda _: [wrong])
    code, out, _ = command("bench", "--selectors")
    assert code == 1 and "WRONG" in out
