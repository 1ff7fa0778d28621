"""Test the framework of ``sparsync reproduce``: files, pages, failures and names."""

import csv
import io
import json
import re

import pytest
import typer
from matplotlib.image import imread
from rich.console import Console

from sparsync.cli.app import make_app
from sparsync.errors import ConfigurationError
from sparsync_papers.reproduce import (
    Comparison,
    Outcome,
    Panel,
    Settings,
    Table,
    Unavailable,
    artifact,
)
from sparsync_papers.reproduce import command as command_module
from sparsync_papers.reproduce.catalogue import ARTIFACTS, UNAVAILABLE
from sparsync_papers.reproduce.command import command, find, reproduce
from sparsync_papers.reproduce.drawing import png
from sparsync_papers.reproduce.report import page, shown, write_files

HALF = ("half <of> 1", "0.5 & more", "section 1", "0.4", False)  # of a Comparison
KINDS = ("curves", "bars", "stacks")


@artifact("oktopk-works", "conclusion", minutes=0.1)
def works(settings):
    """Title [b]."""
    rows = Table({"P": p, "seconds": settings.seed + 1 / p} for p in settings.track((1, 2)))
    curve = {"ours": rows.points("P", "seconds"), "theirs": [(1, 2.0), (2, 1.0)]}
    panels = [Panel(kind, "P", "s", curve, kind=kind, log="y") for kind in KINDS]
    return Outcome(
        rows, [Comparison(*HALF, "[it] is less")], {"n": 5, "steps": 40}, "a lot", panels
    )


@artifact("oktopk-breaks", "conclusion", minutes=0.1)
def breaks(settings):
    """Title."""
    raise ValueError("no <such> thing\nand more")


def text_of(finished):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown(finished))
    return console.export_text()


def test_a_run_shows_both_figures_settings_and_what_differs():
    (finished,) = reproduce([works], Settings(seed=3))
    text = text_of(finished)
    for part in ("0.5 & more", "(section 1)", "0.4", "no: [it] is less", "title [b]"):
        assert part in text
    assert (
        "n 5, steps 40; seed 3" in text
        and "1, 40" in text
        and "seeds, steps" in text
        and "Differs from the paper: a lot" in text
    )
    assert "Quick" not in text


def test_files_hold_rows_comparisons_and_pictures(tmp_path):
    (finished,) = reproduce([works], draw=True)
    paths = {path.suffix: path for path in write_files(finished, tmp_path)}
    rows = list(csv.DictReader(paths[".csv"].read_text().splitlines()))
    assert rows == [{"P": "1", "seconds": "1.0"}, {"P": "2", "seconds": "0.5"}]
    content = json.loads(paths[".json"].read_text())
    (compared,) = content["comparisons"]
    assert compared["stated"]["what"] == "half <of> 1" and compared["same"] is False
    assert (content["seeds"], content["steps"]) == (1, 40)
    assert content["settings"] == {"n": 5, "steps": 40} and content["differs"] == "a lot"
    assert paths[".png"].read_bytes().startswith(b"\x89PNG")


def test_what_fails_does_not_stop_the_others_and_is_told():
    first, second = reproduce([breaks, works])
    assert first.outcome is None and first.error == "ValueError: no <such> thing"
    assert second.outcome is not None
    assert "failed: ValueError" in text_of(first)


def test_the_page_has_every_comparison_picture_and_failure():
    text = page(reproduce([works, breaks], draw=True), [Unavailable("a | b", "P.", "no time")])
    assert (
        "| oktopk-works | half <of> 1 | 0.5 & more (section 1) | 0.4 | no: [it] is less | 1, 40 |"
        in text
    )
    assert "| oktopk-breaks | failed: ValueError: no <such> thing |" in text
    assert "![title [b]](oktopk-works.png)" in text and "| a / b | P. | no time |" in text
    assert "2 artifacts, 0 of 1 conclusions are the papers'; 1 failed." in text


def test_a_quick_run_says_so_everywhere():
    (finished,) = reproduce([works], Settings(quick=True))
    assert "Quick: scaled down" in text_of(finished)
    assert "Quick: scaled down" in page([finished], [])


def test_another_conclusion_needs_a_reason():
    with pytest.raises(ConfigurationError, match=r"half <of> 1: .*say why"):
        Comparison(*HALF)


@pytest.mark.parametrize("kind", KINDS)
def test_two_series_can_be_told_apart_in_grey(kind):
    """Drawing crossing series in the other order changes the picture, so more than colour differs."""
    points_of = {"a": [(1, 1.0), (2, 2.0)], "b": [(1, 2.0), (2, 1.0)]}

    def grey(names):
        panel = Panel("", "", "", {name: points_of[name] for name in names}, kind=kind)
        return imread(io.BytesIO(png([panel])))[..., :3].mean(-1)

    assert abs(grey("ab") - grey("ba")).max() > 0.2


# ---- names ----------------------------------------------------------------------------------------


def test_names_are_unique_and_paper_first():
    names = [artifact.name for artifact in ARTIFACTS]
    assert len(set(names)) == len(names)
    papers = {artifact.paper for artifact in ARTIFACTS}
    assert papers == {"Ok-Topk", "RedSync", "SparCML", "WAGMA"} >= {u.paper for u in UNAVAILABLE}
    assert all(artifact.title and artifact.conclusion for artifact in ARTIFACTS)


# the captions of each paper: figures, tables
PRINTED = {
    "Ok-Topk": (range(1, 14), ["1", "2"]),
    "RedSync": (range(1, 12), ["1", "2"]),
    "SparCML": (range(1, 8), ["1", "2", "3"]),
    "WAGMA": (range(1, 12), ["I"]),
}


def mentioned(text: str) -> set[str]:
    """Return the figures and tables in "oktopk-fig8-9-table1" or "Figures 4 to 6, 9 and 11; Table I"."""
    numbers = r"(?:\d+|I)\b"
    found = set()
    for kind, listed in re.findall(
        rf"(fig|table)(?:ure)?s?\s*({numbers}(?:(?:, | and | to |-){numbers})*)",
        text,
        re.IGNORECASE,
    ):
        for first, last in re.findall(r"(\d+|I)(?: to (\d+))?", listed):
            span = map(str, range(int(first), int(last) + 1)) if last else [first]
            found |= {f"{kind.lower()} {number}" for number in span}
    return found


def test_names_and_reasons_mention_figures():
    assert mentioned("x-fig6-table1") == {"fig 6", "table 1"}
    assert mentioned("redsync-fig8-9") == {"fig 8", "fig 9"}
    assert mentioned("Figures 4 to 6, 9 and 11; Table I") == {
        *(f"fig {n}" for n in (4, 5, 6, 9, 11)),
        "table I",
    }
    assert mentioned("ablations of section 5.2") == set()


@pytest.mark.parametrize("paper", sorted(PRINTED))
def test_every_figure_and_table_is_reproduced_or_has_a_reason(paper):
    figures, tables = PRINTED[paper]
    printed = {*(f"fig {n}" for n in figures), *(f"table {n}" for n in tables)}
    here = [mentioned(a.name) for a in ARTIFACTS if a.paper == paper]
    missing = [mentioned(u.what) for u in UNAVAILABLE if u.paper == paper]
    assert set.union(*here, *missing) == printed


def test_an_unknown_name_gets_one_line_with_close_ones():
    with pytest.raises(ConfigurationError, match=r"oktopk-tabel1.*did you mean oktopk-table1"):
        find("oktopk-tabel1")
    with pytest.raises(ConfigurationError, match="--list shows the names"):
        find("zzz")


def test_the_help_of_all_commands_tells_the_papers_commands_apart():
    helps = {c.name: c.help for c in make_app("plan").registered_commands}
    assert helps["reproduce"].startswith("Reproduce the papers' tables")
    assert helps["time-to-loss"].startswith("Predict which training method")


# ---- the command ----------------------------------------------------------------------------------


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(command_module, "ARTIFACTS", (works, breaks))


def test_all_writes_the_page_and_ends_with_1_if_one_fails(two, tmp_path, capsys):
    with pytest.raises(typer.Exit) as ended:
        command(all_=True, out=tmp_path / "new" / "folder")
    assert ended.value.exit_code == 1
    assert "failed: oktopk-breaks" in capsys.readouterr().err
    files = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert files == {f"oktopk-works.{end}" for end in ("csv", "json", "png")} | {"index.md"}


def test_the_list_shows_names_and_what_cannot_be(two, capsys):
    command(list_=True)
    shown_list = capsys.readouterr().out
    assert "works" in shown_list and "not here" in shown_list


@pytest.mark.parametrize("arguments", [{}, {"names": ["sparcml-fig7"], "all_": True}])
def test_names_or_all_are_needed(arguments):
    with pytest.raises(ConfigurationError, match="names or --all"):
        command(**arguments)


def test_steps_are_for_trainings_that_take_them():
    assert Settings(quick=True, steps=7).steps_or(256, 4) == 7
    assert (Settings().steps_or(256, 4), Settings(quick=True).steps_or(256, 4)) == (256, 4)
    takers = (
        "--steps is for sparcml-fig1, sparcml-fig4, sparcml-fig5, sparcml-fig6, redsync-fig6-table1, "
        "redsync-table2, oktopk-fig4, oktopk-fig6, oktopk-fig5, oktopk-fill-in, oktopk-fig9, "
        "oktopk-fig11, oktopk-fig13, wagma-fig5, wagma-fig8, wagma-ablations, wagma-fig11"
    )
    with pytest.raises(ConfigurationError, match=f"{takers}, not for sparcml-fig7"):
        command(names=["oktopk-fig6", "sparcml-fig7"], steps=5)


def test_seeds_are_for_trainings_whose_means_are_compared():
    assert Settings(seed=4, quick=True, seeds=3).seeds_or(1) == range(4, 7)
    with pytest.raises(
        ConfigurationError, match=r"--seeds is for sparcml-fig4, .*for oktopk-fig6;"
    ):
        command(names=["oktopk-fig9", "oktopk-fig6"], seeds=2)


@pytest.mark.parametrize("option", ["steps", "seeds"])
def test_an_option_reaches_the_artifact(monkeypatch, option):
    seen = []

    @artifact("oktopk-asked", "conclusion", minutes=0.1, steps=5, repeats=True)
    def asked(settings):
        """Title."""
        seen.append(getattr(settings, option))
        return works.run(settings)

    monkeypatch.setattr(command_module, "ARTIFACTS", (asked,))
    command(all_=True, **{option: 6})
    assert seen == [6]


def test_settings_choose_and_count():
    counted = []
    settings = Settings(quick=True, advance=counted.append)
    assert list(settings.track(settings.pick((1, 2), (7,)))) == [7] and counted == [1]
