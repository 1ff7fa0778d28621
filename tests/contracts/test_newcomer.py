"""A collective is one file and one row: contracts and commands read both, with no other edit."""

import json

import pytest
from typer.testing import CliRunner

from sparsync import presets, testing
from sparsync.cli.app import make_app
from sparsync.errors import ConfigurationError


def installed(tmp_path, monkeypatch, points):
    """Install a package that has nothing but entry points."""
    info = tmp_path / "newcomer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newcomer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sparsync.algorithms]\n{points}\n")
    monkeypatch.syspath_prepend(tmp_path)
    presets.presets.cache_clear()


@pytest.fixture(autouse=True)
def _rows_of_the_library_alone():
    yield
    presets.presets.cache_clear()


@pytest.fixture
def star(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, "star = tests.contracts.newcomer:row")


def run(*arguments):
    result = CliRunner().invoke(make_app(), [*map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_it_is_listed_and_keeps_the_contracts(star):
    assert list(presets.presets()) == [*presets.PRESETS, "star"]
    algorithm = presets.resolve("star")
    assert (algorithm.name, algorithm.source) == ("star", "tests")
    testing.check_collective(algorithm.make_collective, world_sizes=(1, 2, 5))
    testing.check_algorithm(algorithm, world_sizes=(1, 3))


def test_bench_plan_and_simulate_run_it(star, tmp_path):
    common, written = ("--ranks", 4, "--network", "1gbit,50us"), tmp_path / "rows.json"
    size = ("--collectives", "star", "--size", 4000, "--steps", 2, "--warmup", 0)
    run("bench", *common, *size, "--json", written)
    [benched] = json.loads(written.read_text())
    assert benched["collective"] == "star" and benched["wrong"] == 0
    planned = json.loads(run("plan", *common, "--model-size", 4000, "--json", "-"))
    [row] = [row for row in planned["table"] if row["collective"] == "star"]
    assert row["messages"] == 6 and row["equation"] == "tests"
    simulated = run("simulate", *common, "--algorithm", "star", "--model-size", 4000, "--json")
    assert "star" in simulated


def test_auto_may_choose_it(star):
    assert "star" in presets.resolve("auto").make_collective().candidates
    assert presets.resolve("auto", candidates=("star",)).make_collective().name == "star"


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("star = tests.contracts.newcomer:star", "is function"),
        ("dense = tests.contracts.newcomer:row", "a name that exists already"),
    ],
)
def test_a_bad_entry_point_is_named(tmp_path, monkeypatch, point, words):
    installed(tmp_path, monkeypatch, point)
    with pytest.raises(ConfigurationError, match=words):
        presets.presets()
