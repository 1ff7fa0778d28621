"""The site's pages: those that the code writes are whole, and what pages show is run."""

import contextlib
import doctest
import io
import re
import socket
from pathlib import Path

import pytest
from site_pages import algorithms, choosing, docstrings, examples, reference, schemes, tables

import sparsync
from sparsync.averaging.schemes import SCHEMES
from sparsync.presets import PRESETS
from tests.fresh import run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SECTIONS = ["Cost", "When to use it", "Differs from the paper", "Options", "Example", "References"]

BEFORE = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sparsync

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
loss_function = torch.nn.functional.mse_loss
loader = [(torch.randn(4, 300), torch.randn(4, 3)) for _ in range(2)]
"""
ATTACHED = """
ddp_model = DistributedDataParallel(torch.nn.Linear(300, 3))
LINE
for inputs, targets in loader:
    ddp_model.zero_grad()
    loss_function(ddp_model(inputs), targets).backward()
assert sync.stats()["exchanges"] == 2
sync.close()
"""
AVERAGED = """
model = torch.nn.Linear(300, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
LINE
assert averager.steps == 2
"""


def page_of(name):
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(text, language="python"):
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def printed_by(code):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "block", "exec"), {"__name__": "block"})
    return out.getvalue()


def run(script, directory, **environment):
    (directory / "script.py").write_text(script)
    process = run_python(directory / "script.py", folder=directory, **environment)
    assert process.returncode == 0, process.stderr
    return process.stdout


# ---- pages of algorithms and schemes ----------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_has_a_page_whose_program_prints_what_it_shows(name):
    page = algorithms.page(name)
    assert re.findall(r"^## (.*)$", page, flags=re.MULTILINE) == SECTIONS
    origin = re.search(r"^\*\*From:\*\* (.+)$", page, flags=re.MULTILINE)[1]
    assert "](http" in page and ("](http" in origin or "sparsync" in origin or name == "dense")
    for option in re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", page, flags=re.MULTILINE):
        assert option[1].strip(), f"{option[0]} is not explained"
    attach, program = blocks(page)
    assert attach.strip() == algorithms.attach_line(name)
    assert printed_by(program) == blocks(page, "text")[0]


def test_the_table_has_every_algorithm():
    rows = re.findall(r"^\| \[`([\w-]+)`\]\(\1.md\)", algorithms.overview(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(PRESETS)


def test_the_cost_of_a_page_is_that_of_the_papers_equation():
    """Table 1 of Ok-Topk: 2 n (P - 1) / P words dense, 2 k (P - 1) for TopkA (and 2 per header)."""
    n, k = 14_728_266, 147_283
    dense = -(-n // 8) * 2 * 7  # blocks are rounded up
    assert f"| 8 | {dense:,} |" in algorithms.page("dense")
    assert f"| 64 | {63 * (2 * k + 2):,} |" in algorithms.page("allgather")


@pytest.mark.slow
def test_attach_takes_the_line_of_every_page(tmp_path):
    lines = [ATTACHED.replace("LINE", algorithms.attach_line(name)) for name in PRESETS]
    run("\n".join([BEFORE, *lines, "dist.destroy_process_group()"]), tmp_path)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_a_page_whose_program_prints_what_it_shows(name, monkeypatch):
    monkeypatch.setattr(schemes, "_models_sent", lambda name, world_size: world_size)
    page = schemes.page(name)
    assert re.findall(r"^## (.*)$", page, flags=re.MULTILINE) == SECTIONS
    assert blocks(page)[1] == examples.scheme_program(name)
    assert printed_by(blocks(page)[1]) == blocks(page, "text")[0]
    assert f"[`{name}`]({name}.md)" in schemes.overview()


@pytest.mark.slow
def test_every_scheme_averages_as_its_page_says(tmp_path, monkeypatch):
    monkeypatch.setattr(schemes, "_models_sent", lambda name, world_size: world_size)
    usages = [blocks(schemes.page(name))[0] for name in SCHEMES]
    programs = [AVERAGED.replace("LINE", usage) for usage in usages]
    run("\n".join([BEFORE, *programs, "dist.destroy_process_group()"]), tmp_path)


@pytest.mark.parametrize(
    ("name", "models"), [("allreduce", 2 * 7 / 8), ("local", 2 / 8 * 7 / 8), ("dpsgd", 2.0)]
)
def test_models_sent_are_counted(name, models):
    assert schemes._models_sent(name, 8) == pytest.approx(models, rel=1e-3)


# ---- pages that are written by hand -----------------------------------------------------------------


@pytest.mark.slow
def test_the_decision_tables_are_the_planners():
    """After a change of the planner: python docs/site_pages/choosing.py --write."""
    page = choosing.PAGE.read_text(encoding="utf-8")
    assert choosing.written(page) == page
    assert page.count("<!-- begin:") == len(choosing.tables())
    assert "**dense**" in page


def test_the_quick_start_runs(tmp_path):
    script, without_a_model = blocks(page_of("quick-start.md"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    assert "bytes per step" in run(script, tmp_path, **group)
    run(without_a_model, tmp_path)
    assert "60060" in script and 2 * 3 / 4 * 4 * (1_000 * 10 + 10) == 60_060


def test_the_life_of_a_gradient_prints_what_it_shows():
    page = page_of("life-of-a-gradient.md")
    ((program,), (shown,)) = blocks(page), blocks(page, "text")
    assert printed_by(program) == shown
    assert re.search(r"( {4}gradient --.*?delivered\n)", page, re.DOTALL)[1] in sparsync.__doc__


@pytest.mark.parametrize(
    ("number", "contract"),
    list(enumerate(["check_selector", "check_codec", "check_collective", "check_communicator"])),
)
def test_every_extension_is_short_and_passes_its_contract(number, contract):
    codes = [code for code in blocks(page_of("extending.md")) if "testing." in code]
    code = codes[number]
    assert f"testing.{contract}(" in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    printed = printed_by(code)
    assert not printed or f"print({printed.strip()})" in code or printed.strip() in code


def test_a_link_on_the_page_of_extensions_that_loses_messages_is_seen():
    """The contract of that page can fail: a transport that hands over what came last."""
    code = blocks(page_of("extending.md"))[-1]
    broken = code.replace("comm.posted[link].popleft()", "comm.posted[link].pop()")
    assert broken != code
    with pytest.raises(AssertionError, match="overtook"):
        printed_by(broken)


def test_every_answer_names_a_page_a_test_or_a_benchmark():
    answers = re.split(r"^### ", page_of("faq.md"), flags=re.MULTILINE)[1:]
    assert len(answers) >= 20
    proof = r"\]\([\w/-]+\.md|`test_|`benchmarks/"
    assert [a.split("\n")[0] for a in answers if not re.search(proof, a)] == []


# ---- the API, and how the site is put together ------------------------------------------------------


def test_every_public_module_has_a_place():
    pages = reference.pages()
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(pages.values()), flags=re.MULTILINE)
    assert sorted(shown) == sorted(reference.modules())
    axes = {path.stem for path in (ROOT / "src" / "sparsync").iterdir() if path.suffix == ".py"}
    axes |= {path.parent.name for path in (ROOT / "src" / "sparsync").glob("*/__init__.py")}
    assert axes - {name.split(".")[1] for name in shown} == set(reference.HIDDEN)
    for name in sparsync.__all__:
        assert f"[`sparsync.{name}`][" in pages["api/index.md"]
    assert re.search(r"members: \[.*\bExact\b", pages["api/selection.md"])


def test_the_navigation_has_every_page():
    hooks = pytest.importorskip(
        "hooks", reason="mkdocs is not installed: make docs", exc_type=ImportError
    )
    present = sorted(path.name for path in DOCS.glob("*.md"))
    written = dict.fromkeys(["algorithms/a.md", "schemes/b.md", "api/c.md"], "")
    nav = [
        {"Home": "index.md"},
        {"Guides": ["lab.md", "nobody-wrote-this.md"]},
        *[{title: []} for title in hooks.GENERATED],
        {"Nothing": ["nobody-wrote-this.md"]},
    ]
    complete = hooks.complete(nav, present, written)
    assert sorted(hooks._pages_of(complete)) == sorted([*present, *written])
    assert [title for entry in complete for title in entry][-1] == "API"


def test_documents_that_a_page_names_become_links():
    hooks = pytest.importorskip(
        "hooks", reason="mkdocs is not installed: make docs", exc_type=ImportError
    )
    known = {"lab.md", "api/core.md"}
    text = "see `docs/lab.md`, not `docs/none.md`\n```\n`docs/lab.md`\n```\n"
    linked = hooks.link_documents(text, "api/core.md", known)
    assert linked == text.replace("see `docs/lab.md`", "see [`docs/lab.md`](../lab.md)")
    assert hooks.link_documents(text, "lab.md", known) == text


@pytest.mark.parametrize("module", [choosing, docstrings, examples, tables, reference])
def test_examples_of_the_generator(module):
    assert doctest.testmod(module).failed == 0


def test_papers_are_linked_once_and_never_inside_links():
    text = tables.linked("`SparCML` by [SparCML](https://example.org), SparCML and SparCML")
    assert text == (
        f"`SparCML` by [SparCML](https://example.org), [SparCML]({tables.PAPERS['SparCML']}) and SparCML"
    )
