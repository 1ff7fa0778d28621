"""Test that the site's generated pages are complete and that its examples run."""

import contextlib
import doctest
import io
import re
import socket
from pathlib import Path

import pytest
from site_pages import algorithms, choosing, docstrings, examples, reference, rooms, schemes, tables

import sparsync
from sparsync.averaging.schemes import SCHEMES
from sparsync.presets import PRESETS
from tests.fresh import run_python
from tests.tables import cases

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


def test_a_page_shows_the_defaults_of_the_preset_and_not_those_of_its_collective():
    page = algorithms.page("oktopk-paper")
    shown = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", page, re.MULTILINE))
    assert (shown["boundaries"], shown["global_threshold"]) == ("'average'", "'allgather'")
    assert (shown["cap"], shown["threshold_period"], shown["codec"]) == ("None", "32", "None")


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


@cases(("allreduce", 2 * 7 / 8), ("local", 2 / 8 * 7 / 8), ("dpsgd", 2.0))
def test_models_sent_are_counted(name, models):
    assert schemes._models_sent(name, 8) == pytest.approx(models, rel=1e-3)


# ---- pages that are written by hand -----------------------------------------------------------------


@pytest.mark.slow
def test_the_decision_tables_are_the_planners():
    """After a change of the planner, run: python docs/site_pages/choosing.py --write"""
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


@cases(
    ("A collective", "check_collective"),
    ("A scheme of averaging", "check_averager"),
    ("A codec", "check_codec"),
    ("A selector", "check_selector"),
    ("A transport", "check_communicator"),
)
def test_every_extension_is_short_and_passes_its_contract(title, contract):
    section = page_of("extending.md").split(f"\n## {title}\n")[1].split("\n## ")[0]
    code = "\n".join(blocks(section))
    assert f"testing.{contract}(" in code
    assert len([line for line in blocks(section)[0].splitlines() if line.strip()]) <= 40
    printed = printed_by(code)
    assert not printed or f"print({printed.strip()})" in code or printed.strip() in code


def test_the_rows_of_the_page_of_extensions_are_a_rooms():
    code = "\n".join(code for code in blocks(page_of("extending.md")) if "Threads" not in code)
    scope = {"__name__": "block"}
    exec(compile(re.sub(r"^testing\..*$", "", code, flags=re.MULTILINE), "block", "exec"), scope)
    named = re.findall(r'"sparsync\.(\w+)"\]\n([\w-]+) = "', page_of("extending.md"))
    assert [(kind, name) for kind, rows in scope["ROWS"].items() for name in rows] == named


def test_a_link_on_the_page_of_extensions_that_loses_messages_is_seen():
    """The contract on the page can fail, e.g. for a transport that returns the last message first."""
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


@pytest.fixture
def hooks():
    reason = "mkdocs is not installed: make docs"
    return pytest.importorskip("hooks", reason=reason, exc_type=ImportError)


def test_the_navigation_has_every_page_once(hooks):
    yaml = pytest.importorskip("mkdocs.utils")
    with (ROOT / "mkdocs.yml").open("rb") as file:
        nav = yaml.yaml_load(file)["nav"]
    present = sorted(path.name for path in DOCS.glob("*.md"))
    complete = hooks.complete(nav, present, hooks.sections())
    assert [title for entry in complete for title in entry] == [
        *("Home", "Start", "Train", "Papers", "Extend", "Plan and simulate", "Reference")
    ]
    written = {
        *(f"algorithms/{name}.md" for name in ["index", *PRESETS]),
        *(f"schemes/{name}.md" for name in ["index", *SCHEMES]),
        *(f"papers/{room}/index.md" for room in rooms.NAMES),
        *reference.pages(),
    }
    assert sorted(hooks._pages_of(complete)) == sorted([*present, *written])
    assert set(hooks._pages_of(nav)) == set(present), "list a new page in mkdocs.yml"


def test_pages_that_are_not_there_are_left_out_and_new_ones_are_listed(hooks):
    nav = [{"Home": "a.md"}, {"Train": ["b.md", {"Gradients": []}]}, {"Gone": ["gone.md"]}]
    present = ["a.md", "b.md", "c.md"]
    complete = hooks.complete([*nav, {hooks.REST: []}], present, {"Gradients": ["d"]})
    home, train = {"Home": "a.md"}, {"Train": ["b.md", {"Gradients": ["d"]}]}
    assert complete == [home, train, {hooks.REST: ["c.md"]}]


@pytest.mark.parametrize("room", rooms.NAMES)
def test_a_room_has_its_page_with_those_of_its_rows_below(room, hooks):
    page = rooms.page(room)
    assert page.startswith(f"# {rooms.NAMES[room]}\n")
    for heading in ("Terms", "Run it", "Not here", "Figures"):
        assert re.search(rf"^{heading}\n-+$", page, re.MULTILINE), heading
    assert "====" not in page and "``" not in re.sub("^```.*$", "", page, flags=re.MULTILINE)
    assert "::" not in page
    below = rooms.pages_below(room)
    assert below and all(f"](../../{path})" in page for path in below)
    section = next(pages for pages in hooks.sections().values() if rooms.page_of(room) in pages)
    assert section == [rooms.page_of(room), *below]
    for path in below:
        kind, name = path.removesuffix(".md").split("/")
        assert f"](../{rooms.page_of(room)})" in rooms.pointer(kind, name)[0]


def test_presets_and_schemes_of_the_core_are_no_papers():
    own = ("index", "dense", "budgeted", "halving", "allgather", "auto", "quantised")
    assert set(rooms.core("algorithms")) == {f"algorithms/{name}.md" for name in own}
    assert {"schemes/local.md", "schemes/diloco.md"} < set(rooms.core("schemes"))
    assert rooms.pointer("schemes", "diloco") == []


def test_the_home_page_begins_with_the_picture_and_the_table_of_the_readme():
    home, readme = page_of("index.md"), (ROOT / "README.md").read_text(encoding="utf-8")
    marks = ("](images/frontier.png)", "\n| ", ".md)")
    picture, table, links = map(home.index, marks)
    assert picture < table < links
    results = home[table : home.index("\n\n", table)].strip()
    assert len(results.splitlines()) == 9 and results in readme


def test_documents_that_a_page_names_become_links(hooks):
    known = {"lab.md", "api/core.md"}
    text = "see `docs/lab.md`, not `docs/none.md`\n```\n`docs/lab.md`\n```\n"
    linked = hooks.link_documents(text, "api/core.md", known)
    assert linked == text.replace("see `docs/lab.md`", "see [`docs/lab.md`](../lab.md)")
    assert hooks.link_documents(text, "lab.md", known) == text
    known.add("papers/wagma/index.md")
    linked = hooks.link_documents("`sparsync.published.wagma`, `sparsync.wire`", "a/b.md", known)
    assert linked == "[`sparsync.published.wagma`](../papers/wagma/index.md), `sparsync.wire`"


@pytest.mark.parametrize("module", [choosing, docstrings, examples, reference, rooms, tables])
def test_examples_of_the_generator(module):
    assert doctest.testmod(module).failed == 0


def test_papers_are_linked_once_and_never_inside_links():
    text = tables.linked("`SparCML` by [SparCML](https://example.org), SparCML and SparCML")
    page = tables.PAPERS["SparCML"]
    assert text == f"`SparCML` by [SparCML](https://example.org), [SparCML]({page}) and SparCML"
