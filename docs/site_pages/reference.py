"""Write the API pages from docstrings: one per public package, and one for all remaining modules.

Modules are parsed, not imported, so modules that need MPI or Triton have pages even if MPI or Triton is
missing.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from types import MappingProxyType

import sparsync
from site_pages.tables import ROOT, table_row
from sparsync.tables import ROOMS

__all__ = ["HIDDEN", "defined", "modules", "pages"]

HIDDEN = MappingProxyType(
    {
        "__init__": "its names are on the index",
        "__main__": "the command line",
        "cli": "the command line",
    }
)
"""Modules without a page, and why they have none."""

_SOURCE = ROOT / "src" / "sparsync"
_TOGETHER = "core"  # the page for all modules that are not in a subpackage
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def pages() -> dict[str, str]:
    """Return all pages by their paths in the site."""
    groups = _groups()
    return {
        "api/index.md": _index(groups),
        **{f"api/{name}.md": _page(name, members) for name, members in groups.items()},
    }


def modules() -> dict[str, Path]:
    """Return the files of all public modules by module name."""
    found = {}
    for path in sorted(_SOURCE.rglob("*.py")):
        first, *rest = path.relative_to(_SOURCE).with_suffix("").parts
        parts = [part for part in (first, *rest) if part != "__init__"]
        if first not in HIDDEN and not any(part.startswith("_") for part in parts):
            found[".".join(["sparsync", *parts])] = path
    return found


def _groups() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {_TOGETHER: []}
    for name, path in modules().items():
        axis = name.split(".")[1]
        packaged = path.parent != _SOURCE
        groups.setdefault(axis if packaged else _TOGETHER, []).append(name)
    return groups


def defined(path: Path) -> list[str]:
    """Return the public names that a module itself defines, without those that it imports."""
    return list(_defined(path, path.stat().st_mtime_ns))


@functools.cache
def _defined(
    path: Path, changed: int
) -> tuple[str, ...]:  # the time of change is a key, because `mkdocs serve` rebuilds changed files
    own: set[str] = set()
    public: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, _Definition):
            own.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [ast.unparse(target) for target in targets]
            own.update(names)
            if names == ["__all__"] and node.value is not None:
                public = ast.literal_eval(node.value)
    return tuple(name for name in public if name in own)


def _index(groups: dict[str, list[str]]) -> str:
    """Return the page that lists the public names of the package ``sparsync``."""
    known = modules()
    homes = {name: home for home, path in known.items() for name in defined(path)}
    rows = [table_row("name", "defined in"), table_row("---", "---")]
    for name in sparsync.__all__:
        home = getattr(getattr(sparsync, name), "__module__", homes.get(name))
        # a constant's ``__module__`` is the module of its type
        home = homes[name] if home not in known else home
        rows.append(table_row(f"[`sparsync.{name}`][{home}.{name}]", f"`{home}`"))
    parts = [f"- [{_title(name)}]({name}.md): {_about(name)}" for name in groups]
    return "\n".join(
        [
            "# API reference",
            "",
            "These pages come from the docstrings, whose examples are run as tests. "
            "`import sparsync` provides:",
            "",
            *rows,
            "",
            "By part:",
            "",
            *parts,
            "",
        ]
    )


def _title(name: str) -> str:
    return "The core" if name == _TOGETHER else f"sparsync.{name}"


def _about(name: str) -> str:
    if name == _TOGETHER:
        return "the life of a gradient, and what all parts share."
    tree = ast.parse((_SOURCE / name / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").split("\n")[0]


def _page(name: str, members: list[str]) -> str:
    known, blocks = modules(), [f"# {_title(name)}"]
    for module in members:
        shown = defined(known[module])
        listed = f"[{', '.join(shown)}]" if shown else "false"
        options = f"    options:\n      members: {listed}"
        # a room's docstring is shown on the room's own page
        if module in ROOMS and module.startswith("sparsync.published."):
            options += "\n      show_docstring_description: false"
        blocks.append(f"::: {module}\n{options}")
    return "\n\n".join(blocks) + "\n"
