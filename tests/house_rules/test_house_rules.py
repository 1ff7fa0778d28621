"""The rules of the house that a machine can check; CONTRIBUTING.md says what they are for."""

import ast
import importlib
import io
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sparsync"
FILES = sorted(SOURCE.rglob("*.py"))

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50  # without the docstring

# imports run from right to left: a row may import itself and the rows above it
LAYERS = (
    ("errors", "kernels", "operations", "sparse", "state", "streams", "transports"),
    ("selection", "wire"),
    ("collectives",),
    ("planning",),
    (
        "api",
        "checkpoint",
        "correction",
        "launchers",
        "monitoring",
        "presets",
        "reducer",
        "reducer_state",
        "residual",
        "resharding",
        "scaling",
        "units",
        "vectors",
        "warmup",
    ),
    ("averaging", "linear"),
    ("integrations",),
    ("__init__", "__main__", "bench", "cli", "lab", "reproduce", "testing", "workloads"),
)
LEVEL_OF = {axis: level for level, row in enumerate(LAYERS) for axis in row}

# what knows no network: it sees the seam of the transports, and no adapter
ALGORITHMS = (
    "selection",
    "wire",
    "collectives",
    "planning",
    "averaging",
    "correction",
    "reducer",
    "reducer_state",
    "residual",
    "resharding",
    "scaling",
)
SEAM = {"actors", "base", "flight", "framing", "ledger", "primitives"}

# the only imports that are not done at run time (for annotations; they would close a circle)
TYPE_CHECKING_ONLY = {
    ("sparsync.transports.primitives", "sparsync.transports.base"),
    ("sparsync.transports.base", "sparsync.transports.actors"),
    ("sparsync.transports.zmq.line", "sparsync.transports.zmq.communicator"),
}

SEAM_CLASSES = {"Selector", "Codec", "DenseCodec", "Collective", "Averager"}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def axis_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


MODULES = {name_of(path): path for path in FILES}
TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}

every_module = pytest.mark.parametrize("module", sorted(MODULES))


def imports_of(module: str) -> Iterator[str]:
    """Every imported module, wherever in the file; ``from p import m`` gives p.m if that exists."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES or node.module == "torch" else str(node.module)


def inner_imports_of(module: str) -> set[str]:
    return {name for name in imports_of(module) if name.split(".")[0] == "sparsync"}


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


# ---- names ----------------------------------------------------------------------------------------


def order(name: str) -> tuple[bool, bool, str]:
    """CONSTANTS, then Classes, then functions; each by the alphabet."""
    return not name.isupper(), name[0].islower(), name


@every_module
def test_all_is_sorted_and_true(module):
    defined = {
        node.name
        for node in TREES[module].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    }
    if module.endswith("__main__"):
        assert not defined
        return
    loaded = importlib.import_module(module)
    exported = getattr(loaded, "__all__", [])
    assert exported == sorted(set(exported), key=order)
    assert [name for name in exported if not hasattr(loaded, name)] == []
    assert sorted(defined - set(exported)) == [], "public by name but not in __all__"


# ---- imports --------------------------------------------------------------------------------------


@every_module
def test_imports_run_one_way(module):
    assert axis_of(module) in LEVEL_OF, "a new axis: give it a place in LAYERS"
    level = LEVEL_OF[axis_of(module)]
    upward = {name for name in inner_imports_of(module) if LEVEL_OF[axis_of(name)] > level}
    assert not upward


def test_modules_import_in_no_circle():
    edges = {
        module: {
            name
            for name in inner_imports_of(module)
            if name in MODULES and (module, name) not in TYPE_CHECKING_ONLY
        }
        for module in MODULES
    }
    TopologicalSorter(edges).prepare()  # raises CycleError with the circle


@pytest.mark.parametrize("module", sorted(m for m in MODULES if axis_of(m) in ALGORITHMS))
def test_algorithms_know_no_adapter(module):
    parts = [name.split(".") for name in inner_imports_of(module)]
    used = {p[2] if len(p) > 2 else "" for p in parts if p[1:2] == ["transports"]}
    assert used <= SEAM
    assert not any(name.startswith("torch.distributed") for name in imports_of(module))
    named = [n for n in ast.walk(TREES[module]) if isinstance(n, ast.Attribute)]
    assert not [n.lineno for n in named if n.attr == "distributed"]


@pytest.mark.parametrize("module", sorted(m for m in MODULES if axis_of(m) == "transports"))
def test_transports_know_no_algorithm(module):
    assert {axis_of(name) for name in inner_imports_of(module)} <= {"transports", "errors"}


# ---- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [*FILES, *sorted((ROOT / "tests").rglob("*.py"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@every_module
def test_functions_are_short(module):
    for function in functions_of(TREES[module]):
        lines = function.end_lineno - function.lineno + 1
        if ast.get_docstring(function, clean=False) is not None:
            docstring = function.body[0]
            lines -= docstring.end_lineno - docstring.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{function.name} has {lines} lines"


# ---- state and output -----------------------------------------------------------------------------


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        makers = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter"}
        return value.func.id in makers
    literals = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, literals)


@every_module
def test_no_state_in_modules_or_classes(module):
    tree = TREES[module]
    bodies = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for node in (node for body in bodies for node in body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assert [ast.unparse(t) for t in targets] == ["__all__"], f"line {node.lineno}"
    assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Global)]


@every_module
def test_nothing_prints(module):
    calls = [n for n in ast.walk(TREES[module]) if isinstance(n, ast.Call)]
    assert not [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


def is_code(comment: str) -> bool:
    """A statement that does something; an equation (``a = b + c``) explains and is welcome."""
    try:
        body = ast.parse(comment.lstrip("# ").strip()).body
    except SyntaxError:
        return False
    acting = ast.Import | ast.ImportFrom | ast.Return | ast.Raise | ast.Assert | ast.Delete
    return any(
        isinstance(node, acting)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call))
        for node in body
    )


@every_module
def test_no_code_is_commented_out(module):
    source = io.StringIO(MODULES[module].read_text())
    comments = [t for t in tokenize.generate_tokens(source.readline) if t.type == tokenize.COMMENT]
    assert not [f"line {t.start[0]}: {t.string}" for t in comments if is_code(t.string)]


# ---- docstrings -----------------------------------------------------------------------------------


def algorithms() -> Iterator[tuple[str, ast.ClassDef]]:
    """Every class that fills a seam: one algorithm of an axis."""
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {ast.unparse(base) for base in node.bases}
                if bases & SEAM_CLASSES:
                    yield f"{module}.{node.name}", node


ALGORITHM_CLASSES = dict(algorithms())


def test_the_algorithms_are_found():
    assert {name.split(".")[-1] for name in ALGORITHM_CLASSES} >= {"Coo", "Exact", "OkTopk"}


@pytest.mark.parametrize("name", sorted(ALGORITHM_CLASSES))
def test_an_algorithm_says_what_it_costs_keeps_and_changes(name):
    docstring = ast.get_docstring(ALGORITHM_CLASSES[name]) or ""
    missing = [w for w in ("Cost:", "State:", "Differs from the paper:") if w not in docstring]
    assert not missing


@pytest.mark.parametrize("name", sorted(ALGORITHM_CLASSES))
def test_an_algorithm_is_final(name):
    decorators = {ast.unparse(d) for d in ALGORITHM_CLASSES[name].decorator_list}
    assert "final" in decorators


@pytest.mark.parametrize("module", sorted(m for m in MODULES if axis_of(m) == "collectives"))
def test_a_public_function_that_communicates_says_what_it_costs(module):
    for node in TREES[module].body:
        if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_"):
            assert "Cost:" in (ast.get_docstring(node) or ""), node.name
