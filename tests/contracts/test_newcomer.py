"""Check that one file and one row suffice for contracts and commands to find a new algorithm.

The files and the entry points come from ``docs/extending.md``.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sparsync import presets, testing
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.cli.app import make_app
from sparsync.cli.named_algorithms import named
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS
from sparsync.selection import SELECTORS
from sparsync.tables import ALIASES, ROOMS, Table
from sparsync.wire import CODECS
from tests.fresh import run_python

EXTENDING = Path(__file__).parents[2] / "docs" / "extending.md"
FILES = {
    "star": "A collective",
    "pairs": "A scheme of averaging",
    "bitmap": "A codec",
    "random_k": "A selector",
}
TABLES = {"star": PRESETS, "pairs": SCHEMES, "bitmap": CODECS, "random-k": SELECTORS}
BAD = {"star": "a function", "pairs": "a int", "bitmap": "a type", "random-k": "a str"}


def section(title):
    return EXTENDING.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def block(title, language="python"):
    return re.search(rf"^```{language}\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)[1]


def entry_points():
    """Return the entry-point groups of the page's pyproject.toml, as if its package were installed."""
    named = block("One row: a name for every command", "toml").replace('"', "")
    return named.replace("project.entry-points.", "")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with these files and entry points."""

    def put(points, **files):
        package, info = tmp_path / "my_package", tmp_path / "my_package-1.0.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").touch()
        for name, code in files.items():
            (package / f"{name}.py").write_text(code)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(tmp_path)

    yield put
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.fixture
def newcomer(install):
    install(entry_points(), **{name: block(title) for name, title in FILES.items()})


def run(*arguments):
    result = CliRunner().invoke(make_app(), [*map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_each_table_ends_with_the_rows_of_the_package(newcomer):
    for name, table in TABLES.items():
        assert list(table)[-1] == name
        assert table[name] is not None
    in_rooms = {name for table in TABLES.values() for name, _ in table._rooms.values()}
    assert not set(TABLES) & in_rooms


def test_the_collective_keeps_the_contracts(newcomer):
    algorithm = presets.resolve("star")
    assert (algorithm.name, algorithm.source) == ("star", "my paper, section 3")
    testing.check_collective(algorithm.make_collective, world_sizes=(1, 2, 5))
    testing.check_algorithm(algorithm, world_sizes=(1, 3))


def test_the_scheme_keeps_the_contract(newcomer):
    assert options_of("pairs") == {"seed": 0}
    testing.check_averager(SCHEMES["pairs"], world_sizes=(1, 2, 3, 4, 7))


def test_the_codec_keeps_the_contract(newcomer):
    testing.check_codec(CODECS["bitmap"])


def test_the_selector_keeps_the_contract(newcomer):
    testing.check_selector(SELECTORS["random-k"])


def test_bench_plan_and_simulate_run_the_collective(newcomer, tmp_path):
    common, written = ("--ranks", 4, "--network", "1gbit,50us"), tmp_path / "rows.json"
    size = ("--collectives", "star", "--size", 4000, "--steps", 2, "--warmup", 0)
    run("bench", *common, *size, "--json", written)
    [benched] = json.loads(written.read_text())
    assert benched["collective"] == "star" and benched["wrong"] == 0
    planned = json.loads(run("plan", *common, "--model-size", 4000, "--json", "-"))
    [row] = [row for row in planned["table"] if row["collective"] == "star"]
    assert row["messages"] == 6 and row["equation"] == "my paper, section 3"
    simulated = run("simulate", *common, "--algorithm", "star", "--model-size", 4000, "--json")
    assert "star" in simulated


def test_auto_may_choose_the_collective(newcomer):
    assert "star" in presets.resolve("auto").make_collective().candidates
    assert presets.resolve("auto", candidates=("star",)).make_collective().name == "star"


def test_the_papers_name_is_an_alias_in_every_spelling(newcomer):
    assert PRESETS.name_of("star_topk SGD") == "star"
    assert presets.resolve("STAR-TOPK-SGD").name == "star"


def test_arguments_without_types_are_options_by_their_look(newcomer):
    assert named("pairs:seed=3", SCHEMES).options == {"seed": 3}
    assert named("Pairs:seed=none", SCHEMES).options == {"seed": None}


def test_the_help_of_train_names_the_collective_and_the_scheme(newcomer, tmp_path):
    """Run in a separate process, because a command lists the names when it is imported."""
    script = f"""
import sys

sys.path.insert(0, {str(tmp_path)!r})
from sparsync.cli.app import make_app

make_app("train")(["train", "--help"])
"""
    done = run_python(script, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\bstar\b", done.stdout) and re.search(r"\bpairs\b", done.stdout)


# ---- invalid rows, and names that are taken ---------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("star", "def row(): ..."),
        ("pairs", "row = 1"),
        ("bitmap", "class row: ..."),
        ("random-k", "row = ''"),
    ],
)
def test_an_entry_point_that_names_no_row_is_refused_where_it_is_asked_for(install, name, value):
    table = TABLES[name]
    install(f"[{table.group}]\n{name} = my_package.row:row\n", row=value)
    message = (
        rf"entry point '{name}' = 'my_package.row:row' of group '{table.group}' of package "
        rf"'my_package' is {BAD[name]};"
    )
    with pytest.raises(ConfigurationError, match=message):
        table[name]


@pytest.mark.parametrize(
    ("table", "taken"),
    [
        (PRESETS, "dense"),
        (PRESETS, "oktopk"),
        (SCHEMES, "wagma"),
        (CODECS, "coo"),
        (SELECTORS, "exact"),
    ],
)
def test_a_name_that_exists_is_left_out_and_said_once(install, capsys, table, taken):
    before = list(table)
    install(f"[{table.group}]\n{taken} = my_package.row:row\n", row="row = 1")
    assert list(table) == list(table) == before and table[taken] != 1
    (said,) = capsys.readouterr().err.splitlines()
    assert (
        f"left out: entry point '{taken}' = 'my_package.row:row' of group '{table.group}'" in said
    )
    assert "of package 'my_package' is a name that exists already" in said


def test_the_tables_have_the_rows_of_all_rooms():
    kinds = {table.group.partition(".")[2]: table for table in (*TABLES.values(), ALIASES)}
    found = 0
    for room in ROOMS:
        for kind, rows in __import__(room, fromlist=["ROWS"]).ROWS.items():
            assert all(kinds[kind][name] is row for name, row in rows.items()), room
            found += len(rows)
    assert found == sum(len(table._rooms) for table in kinds.values()) > 40


def test_a_name_that_nobody_declares_is_a_key_error():
    table = Table("algorithms", {}, callable, "a row")
    with pytest.raises(KeyError, match="nobody"):
        table["nobody"]
