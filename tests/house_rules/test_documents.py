"""Run the examples in the documents, and check statements of the documents against the code."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sparsync
from sparsync import DenseVector, SparseVector
from sparsync.cli import app as cli
from sparsync.presets import PRESETS
from sparsync.published.redsync import SignMean
from sparsync.tables import ALIASES
from sparsync.wire import Coo, LloydMax, SparseQsgd
from tests.fresh import run_python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

DOCUMENTS = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

BEFORE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(6, 3)
loader = [(torch.randn(4, 6), torch.randn(4, 3)) for _ in range(5)]
loss_function = torch.nn.functional.mse_loss
"""
TRAINED = """
assert sync.stats()["local_steps"] == len(loader)
sync.close()
"""
AFTER = """
assert reduced.total.nnz == 1_000
assert all(result.total.nnz == 100 for result in simulation.results)
"""


def blocks(language: str, text: str = README) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    found = [code for name, code in fences if name == language]
    assert found, f"no {language} block"
    return found


def side(diff: str, sign: str) -> str:
    """Return one side of a diff: the common lines, and the lines with the given sign."""
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


def run(directory: Path, *code: str) -> None:
    """Run a script as a user would, in a separate process with a group of one rank, a model and data."""
    script = directory / "train.py"
    script.write_text("\n".join([BEFORE, *code, "dist.destroy_process_group()"]))
    process = run_python(script, folder=directory)
    assert process.returncode == 0, process.stderr


def test_every_block_of_the_readme_runs_and_the_diff_starts_from_plain_ddp(tmp_path):
    before, after = (side(blocks("diff")[0], sign) for sign in "-+")
    assert "sparsync" not in before
    run(tmp_path, before, "model = model.module", after, *blocks("python"), TRAINED)


def test_every_block_about_arrays_runs(tmp_path):
    text = (ROOT / "docs" / "arrays.md").read_text()
    run(tmp_path, *blocks("python", text), AFTER)


def test_every_block_about_theory_runs(tmp_path):
    text = (ROOT / "docs" / "theory.md").read_text()
    run(tmp_path, *blocks("python", text), "assert [*measured][::10] == [0, 10, 20]")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


def test_every_alias_is_listed():
    section = (
        (ROOT / "docs" / "algorithms.md").read_text().split("\n## Names\n")[1].split("\n## ")[0]
    )
    rows = re.findall(r"^\| ([^|`]+) \| (`[^|]*)\|$", section, flags=re.MULTILINE)
    listed = {}
    for theirs, ours in rows:
        names, found = theirs.split(", "), re.findall(r"`([\w-]+)`", ours)
        listed |= dict(
            zip(names, found if len(found) == len(names) else found * len(names), strict=False)
        )
    assert listed == dict(ALIASES)


def test_every_algorithm_is_listed():
    tables = (ROOT / "docs" / "algorithms.md").read_text().split("## Averages of models")[0]
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", tables, flags=re.MULTILINE)) == sorted(PRESETS)


def test_the_readme_draws_the_life_of_a_gradient_as_the_package_does():
    drawing = next(b for b in blocks("") if "accumulate" in b)
    assert textwrap.indent(drawing, "    ") in sparsync.__doc__


def test_the_commands_of_the_documents_have_their_options():
    text = README + (ROOT / "Makefile").read_text().replace("\\\n", " ")
    text += "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    commands = re.findall(
        r"sparsync (train|bench|simulate|plan|doctor|linear|lab \w+) (--[^\n`]*)", text
    )
    assert commands
    for words, given in commands:
        command, options = words.split()[0], given.split(" -- ")[0]
        result = CliRunner().invoke(
            cli.make_app(command), [command, "--help"], env={"COLUMNS": "200"}
        )
        missing = [o for o in re.findall(r"--[\w-]+", options) if o not in result.output]
        assert not missing, f"sparsync {command}"


def test_the_files_that_documents_name_are_there():
    named = [
        (document.name, path)
        for document in DOCUMENTS
        for path in re.findall(r"`([\w-]+(?:/[\w.-]+)+)`", document.read_text())
        if Path(path).suffix in (".cpp", ".h", ".md", ".py")
    ]
    assert len(named) > 20
    places = (ROOT, ROOT / "src" / "sparsync")
    assert [n for n in named if not any((place / n[1]).exists() for place in places)] == []


def test_the_files_that_documents_link_to_are_there():
    """Links must work on the site and in the repository, so none may point to generated pages."""
    more = [
        *(ROOT / "benchmarks").glob("*.md"),
        ROOT / "papers" / "README.md",
        ROOT / "CHANGELOG.md",
    ]
    linked = [
        (document, target)
        for document in [*DOCUMENTS, *more]
        for target in re.findall(
            r"\]\(([^)#\s]+)(?:#[^)]*)?\)",
            re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL),
        )
        if "://" not in target
    ]
    assert len(linked) > 50
    assert [(d.name, t) for d, t in linked if not (d.parent / t).exists()] == []


def test_the_tests_that_documents_name_are_there():
    named = [
        (document.name, test)
        for document in DOCUMENTS
        for test in re.findall(r"`(test_\w+)(?:\[.*?\])?`", document.read_text())
    ]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 20
    assert [n for n in named if f"def {n[1]}(" not in tests and n[1] != "test_batch"] == []


def test_every_benchmark_is_listed():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    listed = re.findall(r"^\| `(\w+\.py)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


MESSAGES = [
    (
        "# Wire format",
        Coo(),
        SparseVector(torch.tensor([3, 70000]), torch.tensor([1.0, -2.5]), 100_000),
    ),
    (
        "## qsgd",
        SparseQsgd(4, block=2, scale="max"),
        SparseVector(torch.tensor([1, 7, 10]), torch.tensor([7.0, -3.0, -0.5]), 12),
    ),
    (
        "## sign-mean",
        SignMean(layers=(5, 0, 7)),
        SparseVector(torch.tensor([1, 7, 10]), torch.tensor([1.0, -3.0, -2.0]), 12),
    ),
    (
        "## lloyd-max",
        LloydMax(2, block=4),
        DenseVector(torch.tensor([3.0, -1.0, 1.0, -3.0, 1.0])),
    ),
]


@pytest.mark.parametrize(("title", "codec", "vector"), MESSAGES)
def test_the_wire_format_document_shows_real_bytes(title, codec, vector):
    text = (ROOT / "docs" / "wire-format.md").read_text()
    section = text.split(title)[1]
    section = section[section.index("51 0") :]  # a message begins with the magic
    shown = "".join(re.findall(r"^ *((?:[0-9a-f]{2} +)+)", section, flags=re.MULTILINE))
    message = bytes(codec.encode(vector).payload.tolist())
    assert bytes.fromhex(shown)[: len(message)] == message
