"""Check the house rules that a machine can check; CONTRIBUTING.md explains them."""

import ast
import importlib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src", ROOT / "papers" / "src")
FILES = sorted(path for source in SOURCES for path in source.rglob("*.py"))

# a row may import itself and all rows above it
LAYERS = (
    (
        "errors",
        "fields",
        "kernels",
        "console",
        "names",
        "reduction",
        "tables",
        "sparse",
        "state",
        "units",
    ),
    ("selection", "transports"),
    ("wire",),
    ("algorithm", "collectives"),
    ("cost", "monitoring"),
    ("presets",),
    ("feedback",),
    ("api", "arrays", "averaging"),
    ("accepted_optimizers", "exclusive", "gradients", "handle", "options", "scalers", "updates"),
    ("dense_or_updates", "elastic", "not_attached", "published"),
    ("attach", "checkpoint", "frameworks", "testing"),
    ("__init__",),
    ("__main__", "cli"),
    ("sparsync_papers",),
)
LEVEL_OF = {axis: level for level, row in enumerate(LAYERS) for axis in row}
MAX_FLOORS = 14

# packages that are independent of the network: they may import the transports' interface, but no
# implementation
ALGORITHMS = ("selection", "wire", "collectives", "cost", "averaging", "feedback")
ADAPTERS = {"process_group", "zmq", "mpi", "sim", "connect", "launchers"}

PACKAGES = {"sparsync", "sparsync_papers"}
SEAM_CLASSES = {
    "Selector",
    "Codec",
    "_Quantised",
    "Collective",
    "StreamCollective",
    "Averager",
    "Accompanied",
}


def name_of(path: Path) -> str:
    source = next(source for source in SOURCES if path.is_relative_to(source))
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def axis_of(module: str) -> str:
    package, *rest = module.split(".")
    if package != "sparsync":
        return package
    return rest[0] if rest else "__init__"


MODULES = {name_of(path): path for path in FILES}
TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def imports_of(module: str) -> Iterator[str]:
    """Return all modules that a file imports anywhere; ``from p import m`` gives p.m if it exists."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES or node.module == "torch" else str(node.module)


def inner_imports_of(module: str) -> set[str]:
    return {name for name in imports_of(module) if name.split(".")[0] in PACKAGES}


# ---- names ----------------------------------------------------------------------------------------


def order(name: str) -> tuple[bool, bool, str]:
    """Sort CONSTANTS first, then Classes, then functions, each alphabetically."""
    return not name.isupper(), name[0].islower(), name


def wrong_names(module: str) -> Iterator[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    named = {node.name for node in TREES[module].body if isinstance(node, kinds)}
    public = {name for name in named if not name.startswith("_")}
    if module.endswith("__main__"):
        yield from public
        return
    loaded = importlib.import_module(module)
    exported = getattr(loaded, "__all__", [])
    if exported != sorted(set(exported), key=order):
        yield "__all__ is not sorted"
    yield from (f"{name} does not exist" for name in exported if not hasattr(loaded, name))
    if axis_of(module) == "sparsync_papers":  # programs, not an interface
        return
    yield from (f"{name} is public by name but not in __all__" for name in public - set(exported))


def test_all_is_sorted_and_true():
    assert not {m: found for m in MODULES if (found := list(wrong_names(m)))}


# ---- imports --------------------------------------------------------------------------------------


def test_imports_run_one_way():
    assert {axis_of(m) for m in MODULES} <= LEVEL_OF.keys(), "a new axis: give it a place in LAYERS"
    upward = [
        f"{module} imports {name}"
        for module in MODULES
        for name in inner_imports_of(module)
        if LEVEL_OF[axis_of(name)] > LEVEL_OF[axis_of(module)]
    ]
    assert not upward


def test_modules_import_in_no_circle_and_few_floors():
    edges = {module: inner_imports_of(module) & MODULES.keys() for module in MODULES}
    TopologicalSorter(edges).prepare()  # raises CycleError with the circle
    assert len(LAYERS) <= MAX_FLOORS


def test_algorithms_know_no_adapter():
    for module in (m for m in MODULES if axis_of(m) in ALGORITHMS):
        parts = [name.split(".") for name in inner_imports_of(module)]
        used = {p[2] if len(p) > 2 else "" for p in parts if p[1:2] == ["transports"]}
        assert not used & ADAPTERS, module
        assert not any(name.startswith("torch.distributed") for name in imports_of(module)), module
        named = [n for n in ast.walk(TREES[module]) if isinstance(n, ast.Attribute)]
        assert not [n.lineno for n in named if n.attr == "distributed"], module


def test_only_the_command_line_draws_and_parses():
    shown = {"typer", "click", "rich", "matplotlib"}
    for module in MODULES:
        if axis_of(module) not in ("cli", "sparsync_papers"):
            assert not {name.split(".")[0] for name in imports_of(module)} & shown, module


def test_transports_know_no_algorithm():
    for module in (m for m in MODULES if axis_of(m) == "transports"):
        used = {axis_of(name) for name in inner_imports_of(module)}
        assert used <= {"transports", "errors"}, module


# ---- state and output -----------------------------------------------------------------------------


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        makers = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter"}
        return value.func.id in makers
    literals = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    return isinstance(value, literals)


def test_no_state_in_modules_or_classes():
    kept = []
    library = {m: tree for m, tree in TREES.items() if axis_of(m) != "sparsync_papers"}
    for module, tree in library.items():
        bodies = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
        for node in (node for body in bodies for node in body):
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if [ast.unparse(target) for target in targets] != ["__all__"]:
                    kept.append(f"{module}:{node.lineno}")
        kept += [f"{module}:{n.lineno}" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    assert not kept


def test_every_new_tensor_names_its_device():
    """Otherwise it would go to the program's default device (``torch.set_default_device``)."""
    makers = {function.__name__ for function in _device_constructors()}
    library = {m: tree for m, tree in TREES.items() if axis_of(m) not in ("cli", "sparsync_papers")}
    assert not [
        f"{module}:{node.lineno}"
        for module, tree in library.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        if (name := ast.unparse(node.func)).startswith("torch.")
        if name.removeprefix("torch.") in makers
        if not {"device", None} & {word.arg for word in node.keywords}
    ]


# attributes of other libraries' objects that share a name with an attribute of this library
FOREIGN = {"options._devices", "sys.path", "tags.input_tags.sparse", "torch.amp.GradScaler.step"}


def stores_in(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def attributes_of(module: str) -> set[str]:
    """Return the attributes that a module's classes declare or set on themselves."""
    tree = TREES[module]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    targets = [n.target for c in classes for n in c.body if isinstance(n, ast.AnnAssign)]
    declared = {target.id for target in targets if isinstance(target, ast.Name)}
    return declared | {node.attr for node in stores_in(tree) if is_own(node)}


def test_only_a_class_and_its_module_set_its_attributes():
    """Other modules must call a method, or set a property with a setter, such as ``state``."""
    own = {module: attributes_of(module) for module in MODULES}
    setters = {
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        if any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)
    }
    ours = set[str]().union(*own.values()) - setters
    found = [
        f"{module}:{node.lineno} sets {ast.unparse(node)}"
        for module in MODULES
        for node in stores_in(TREES[module])
        if node.attr in ours - own[module] and not is_own(node)
        if ast.unparse(node) not in FOREIGN
    ]
    assert not found


def test_a_handle_inherits_from_handle_alone():
    """Handles may differ otherwise only by the objects that are passed to them."""
    bases = {
        node.name: [ast.unparse(base) for base in node.bases]
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    kinds = {name: its for name, its in bases.items() if "Handle" in its}
    assert kinds == {"GradientSync": ["Handle"], "UpdateSync": ["Handle"]}
    assert not [name for name, its in bases.items() if {*its} & {*kinds}]


# ---- pickles: bytes from others, by wire or file, are never unpickled, because a pickle can call
# anything

# exceptions -> why they are safe
PICKLES = {
    "sparsync.errors": "words the error of torch.load",
    "sparsync_papers.workloads.cifar10": "an unpickler that refuses every name but numpy's arrays",
}
SENT_AS_PICKLES = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list"),
    *("recv_pyobj", "scatter_object_list", "send_object_list", "send_pyobj"),
}


def is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def unpickles(call: ast.Call) -> bool:
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    loads = ast.unparse(call.func) == "torch.load" and not is_constant(
        given.get("weights_only"), True
    )
    allowed = not is_constant(given.get("allow_pickle", ast.Constant(False)), False)
    return called in SENT_AS_PICKLES or loads or allowed


def test_nothing_is_unpickled():
    found = {
        f"{module}:{node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and unpickles(node)
    }
    assert not found
    roots = {m: {name.partition(".")[0] for name in imports_of(m)} for m in MODULES}
    assert not {m for m in MODULES if roots[m] & {"cloudpickle", "dill", "marshal", "shelve"}}
    assert {m for m in MODULES if "pickle" in roots[m]} == PICKLES.keys()


# ---- docstrings -----------------------------------------------------------------------------------


def algorithms() -> Iterator[tuple[str, ast.ClassDef]]:
    """Return every class that implements an axis's interface, i.e. every algorithm."""
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
                if bases & SEAM_CLASSES and node.name not in SEAM_CLASSES:
                    yield f"{module}.{node.name}", node


ALGORITHM_CLASSES = dict(algorithms())


def test_the_algorithms_are_found():
    assert {name.split(".")[-1] for name in ALGORITHM_CLASSES} >= {"Coo", "Exact", "OkTopk"}


def test_an_algorithm_is_final_and_says_what_it_costs_keeps_and_changes():
    for name, node in ALGORITHM_CLASSES.items():
        docstring = ast.get_docstring(node) or ""
        missing = [w for w in ("Cost:", "State:", "Differs from the paper:") if w not in docstring]
        assert not missing, name
        assert "final" in {ast.unparse(d) for d in node.decorator_list}, name


def test_a_public_function_that_communicates_says_what_it_costs():
    for module in (m for m in MODULES if axis_of(m) == "collectives"):
        for node in TREES[module].body:
            if isinstance(node, ast.AsyncFunctionDef) and not node.name.startswith("_"):
                assert "Cost:" in (ast.get_docstring(node) or ""), f"{module}.{node.name}"
