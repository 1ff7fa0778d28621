"""Test the commands' reports: tables that fit 80 columns, JSON, and progress."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.output import Columns, progress
from tests.fresh import run_python
from tests.tables import cases

from .consoles import shown

WORDS = st.text("abcdef", min_size=1, max_size=14)
HEADS = st.lists(st.lists(WORDS, min_size=1, max_size=4).map(" ".join), min_size=2, max_size=12)


@given(HEADS, st.text("0123456789", min_size=1, max_size=20))
def test_heads_keep_their_words_and_no_line_is_too_long(heads, cell):
    text = shown(Columns(heads, [[cell] * len(heads)]))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    words = text.split()
    for head in heads:
        assert all(word in words for word in head.split())
    assert words.count(cell) >= len(heads)


def test_a_wide_table_is_shown_in_parts_with_the_first_column():
    lines = shown(Columns(["name", *["x" * 30] * 4], [["one", *"abcd"]])).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("one")] == ["one", "one"]


COMMANDS = {
    "plan": ["--ranks", "8", "--model-size", "1000000", "--network", "1gbit,1us", "--compute", "1",
             "--all"],
    "simulate": ["--ranks", "3", "--model-size", "3000", "--steps", "1"],
    "bench": ["--ranks", "2", "--size", "500", "--steps", "1", "--collectives",
              "dense,recursive-doubling"],
    "bench --kernels": ["--size", "2000"],
    "linear": ["--ranks", "2", "--data", "trigrams", "--rows", "60", "--dimensions", "500",
               "--epochs", "1", "--solver", "scd", "--compare", "dense"],
}  # fmt: skip


@cases(*(pytest.param(c, marks=[pytest.mark.slow] if c == "linear" else []) for c in COMMANDS))
def test_every_table_of_a_command_fits_80_columns(command, monkeypatch, capsys):
    from sparsync.cli import app

    monkeypatch.setenv("COLUMNS", "80")
    arguments = [*command.split(), *COMMANDS[command]]
    code = app.exit_code(lambda: app.make_app(arguments[0])(arguments, standalone_mode=False))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "") and "──" in out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out


def test_a_run_has_a_line_where_there_is_no_terminal(capsys):
    with progress(keep=True) as row, row("dense") as bar:
        bar(2, "loss 3.000 at step 1")
        bar(2, "loss 2.500 at step 2")
    with progress() as row, row("quiet") as bar:
        bar(1)
    err = capsys.readouterr().err
    assert err.startswith("dense: loss 2.500 at step 2 after ") and err.count("\n") == 1


def test_a_long_row_says_how_far_it_is_where_there_is_no_terminal(capsys, monkeypatch):
    clock = iter([0.0, 29.0, 30.0, 31.0, 59.0, 61.0])  # the start, then each call
    monkeypatch.setattr("sparsync.cli.output.time.perf_counter", lambda: next(clock))
    with progress() as row, row("dense") as bar:
        for step in range(1, 6):
            bar(8, f"step {step}")
    err = capsys.readouterr().err
    assert err == "dense: 2 of 8, step 2 after 30 s\ndense: 5 of 8, step 5 after 61 s\n"


@cases(
    (["--help"], {"matplotlib", "scipy", "sparsync.cli.train", "sparsync.cli.bench"}),
    (["linear", "--help"], {"matplotlib", "scipy", "sparsync.cli.train"}),
)
def test_help_imports_no_other_command(arguments, heavy):
    code = (
        "import sys; from sparsync.cli.app import make_app\n"
        f"make_app({arguments[0]!r})({arguments!r}, standalone_mode=False)\n"
        f"sys.exit(bool({heavy!r} & set(sys.modules)))"
    )
    assert run_python(code).returncode == 0
