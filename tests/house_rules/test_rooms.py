"""Check the rooms' docstrings, i.e. the papers' pages: their names exist, and examples run."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
import textwrap
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sparsync
from sparsync import options
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.cli.app import make_app
from sparsync.feedback.correction import Correction
from sparsync.presets import PRESETS
from sparsync.published.wagma import Wagma
from sparsync.tables import ROOMS
from tests.fresh import run_python

ROOT = Path(__file__).parents[2]
PAPERS = [room for room in ROOMS if room.startswith("sparsync.published.")]
SECTIONS = ["Terms", "Run it", "Differs from the paper", "Not here", "Figures"]

BEFORE = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sparsync

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(300, 300)
ddp_model = DistributedDataParallel(torch.nn.Linear(300, 300))
loss_function = torch.nn.functional.mse_loss
loader = [(torch.randn(4, 300), torch.randn(4, 300)) for _ in range(2)]
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.01)
"""
TRAINED = """
for inputs, targets in loader:
    optimizer.zero_grad()
    loss_function(ddp_model(inputs), targets).backward()
    optimizer.step()
assert sync.stats()["exchanges"] == 2, sync.stats()
sync.close()
"""


def text_of(room):
    return inspect.cleandoc(importlib.import_module(room).__doc__)


def sections(room):
    """Return the text of every section by title; text before the first section has the title ""."""
    parts = re.split(r"^(.+)\n-{3,}$", "\n" + text_of(room), flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def programs(room):
    """Return the indented blocks (programs and commands) of the section "Run it"."""
    text = sections(room)["Run it"]
    blocks = re.findall(r"(?:^ {4}.*\n(?:\n(?= {4}))*)+", text + "\n", flags=re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def is_commands(block):
    return block.startswith("sparsync ")


SMALL = re.compile(r"sparsync (bench|plan|simulate) .*size")  # the others take seconds
COMMANDS = [
    pytest.param(line, marks=[] if SMALL.match(line) else pytest.mark.slow)
    for room in PAPERS
    for block in programs(room)
    if is_commands(block)
    for line in block.splitlines()
]


# ---- structure --------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", PAPERS)
def test_a_page_has_the_paper_its_terms_and_every_section(room):
    found = sections(room)
    titles = [title.replace("papers", "paper") for title in found if title]
    assert [title for title in titles if not title.startswith("Table ")] == SECTIONS
    assert re.search(r"<https://\S+>`_, [^.]*\b20[12]\d\b", found[""], re.DOTALL), "title and year"
    rows = [line for line in found["Terms"].splitlines() if line[:1].strip(" =")]
    assert len(rows) > 15
    starts = found["Terms"].index("  ====") - found["Terms"].index("====") + 2
    assert all(line[starts - 2 : starts].isspace() and line[starts:] for line in rows)


@pytest.mark.parametrize("room", PAPERS)
def test_a_page_names_every_row_of_its_room(room):
    rows = importlib.import_module(room).ROWS
    named = set(re.findall(r'"([\w-]+)"', text_of(room)))
    wanted = {*rows.get("algorithms", ()), *rows.get("schemes", ())}
    assert wanted and not wanted - named
    assert {n for n in re.findall(r'[Pp]resets? "([\w-]+)"', text_of(room))} <= set(PRESETS)
    assert {n for n in re.findall(r'schemes? "([\w-]+)"', text_of(room))} <= set(SCHEMES)


# ---- Table I of WAGMA -------------------------------------------------------------------------------

SIZES = {"P": lambda p: p, "sqrt(P)": math.isqrt}  # else a number, the same for all P


def test_table_1_of_wagma_sorts_every_scheme_by_its_attributes():
    text = sections("sparsync.published.wagma")["Table I, for every scheme here"]
    rows = [line.split(maxsplit=4) for line in text.splitlines() if line.startswith('"')]
    assert {row[0].strip('"') for row in rows} == set(SCHEMES) and len(rows) > 10
    for name, averages, size, staleness, rest in rows:
        averager = SCHEMES[name.strip('"')]()
        assert (averager.averaged, averager.staleness) == (averages, staleness), name
        period = averager.global_period
        said = {None: "never", 1: "every step"}.get(period, f"every {period} steps")
        assert rest.startswith(f"{said}  "), name
        for world_size in (16, 64, 256):
            expected = SIZES[size](world_size) if size in SIZES else int(size)
            assert averager.effective_group_size(world_size) == expected, name


def test_the_straggler_of_wagmas_page_takes_the_times_that_it_says(capsys):
    blocks = programs("sparsync.published.wagma")
    (block,) = [block for block in blocks if "sparsync.simulate" in block]
    exec(block, {"sparsync": sparsync, "torch": torch, "Wagma": Wagma})
    printed = capsys.readouterr().out.strip()
    assert printed == "16.0, 6.4"
    said = " ".join(sections("sparsync.published.wagma")["Run it"].split())
    assert all(f"{seconds} seconds" in said for seconds in printed.split(", "))


# ---- names ------------------------------------------------------------------------------------------


def modules_of(package):
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(name) for _, name, _ in found]


def known_names(room):
    """Return the names of the room and the library that a page may use without a module."""
    package = importlib.import_module(room)
    homes = [
        *modules_of(package),
        *(importlib.import_module(name) for name in HOMES),
        package,
        sparsync,
        options,
    ]
    names = {name: value for home in homes for name, value in vars(home).items()}
    names |= {home.__name__.rpartition(".")[2]: home for home in homes}
    return names | {name: getattr(sparsync, name) for name in sparsync.__all__}


HOMES = (
    "sparsync.algorithm",
    "sparsync.averaging",
    "sparsync.collectives",
    "sparsync.collectives.costs",
    "sparsync.feedback.schedule",
    "sparsync.presets",
    "sparsync.reduction",
    "sparsync.selection",
    "sparsync.transports.communicator",
    "sparsync.wire",
)


def parameters(room):
    """Return the names of all arguments of the functions and classes in the room, and of ``attach``."""
    found = {"op"}
    for value in [sparsync.attach, *known_names(room).values()]:
        own = getattr(value, "__module__", "").startswith("sparsync")
        error = isinstance(value, type) and issubclass(value, Exception)
        if own and callable(value) and not error:
            found |= set(inspect.signature(value).parameters)
    for row in PRESETS.values():
        found |= set(row.options)
    for scheme in SCHEMES:
        found |= set(options_of(scheme))
    return found | {field.name for field in dataclasses.fields(Correction)}


def resolved(name, names):
    """Return the object with a dotted name; raise LookupError or AttributeError if there is none."""
    first, *rest = name.split(".")
    if first in ("sparsync", "sparsync_papers"):
        for end in range(len(rest), -1, -1):
            try:
                value = importlib.import_module(".".join([first, *rest[:end]]))
            except ModuleNotFoundError:
                continue
            rest = rest[end:]
            break
    else:
        value = names[first]
    for part in rest:
        fields = getattr(value, "__dataclass_fields__", {})
        value = fields[part] if part in fields else getattr(value, part)
    return value


# terms of steps and averagers that name no object of a module
WORDS = {"average", "finish", "n", "publish", "rank", "total", "world_size"}


@pytest.mark.parametrize("room", PAPERS)
def test_the_names_of_a_page_exist(room):
    for needed in ("sparsync_papers", "sklearn"):
        pytest.importorskip(needed)
    text, names, taken = text_of(room), known_names(room), parameters(room)
    quoted = [" ".join(q.split()) for q in re.findall(r"``(.+?)``", text, re.DOTALL)]
    assert len(quoted) > 30
    wrong = []
    for code in quoted:
        wrong += [code for key in re.findall(r"\b(\w+)=(?!=)", code) if key not in taken]
        called = re.match(r"([A-Za-z_][\w.]*)(?:\(.*\))?$", code)
        if called is None or called[1] in WORDS | taken:
            continue
        try:
            resolved(called[1], names)
        except (KeyError, AttributeError):
            wrong.append(code)
    assert not wrong
    paths = re.findall(r"(?:docs|benchmarks|tests)/[\w/.-]+\.\w+", text)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []


# ---- programs ---------------------------------------------------------------------------------------


@pytest.mark.fast(3)
@pytest.mark.parametrize("room", PAPERS)
def test_the_programs_of_a_page_run(room, tmp_path):
    blocks = [block for block in programs(room) if not is_commands(block)]
    assert blocks
    script = [BEFORE]
    for block in blocks:
        script += [block, TRAINED if "sync =" in block else ""]
    done = run_python("\n".join([*script, "dist.destroy_process_group()"]), folder=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_a_page_run(command):
    if command.startswith("sparsync linear"):
        pytest.importorskip("sklearn")
    result = CliRunner().invoke(make_app(), command.split()[1:])
    assert result.exit_code == 0, (result.output, result.exception)
