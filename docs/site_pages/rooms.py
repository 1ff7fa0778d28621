"""Write one page per room from the room's docstring, with links to its presets and schemes."""

from __future__ import annotations

import importlib
import inspect
import re
from types import MappingProxyType, ModuleType

from site_pages import reference
from site_pages.docstrings import as_markdown
from site_pages.tables import linked
from sparsync.averaging.schemes import SCHEMES
from sparsync.presets import PRESETS
from sparsync.tables import ALIASES, ROOMS

__all__ = [
    "NAMES",
    "called",
    "core",
    "page",
    "page_of",
    "pages",
    "pages_below",
    "pointer",
    "room_of",
]

_PUBLISHED = "sparsync.published."

NAMES = MappingProxyType(
    {
        room.removeprefix(_PUBLISHED): (importlib.import_module(room).__doc__ or "").partition(":")[
            0
        ]
        for room in ROOMS
        if room.startswith(_PUBLISHED)
    }
)
"""The papers' names, with which the rooms' docstrings begin, by room."""

_TABLES = MappingProxyType({"algorithms": PRESETS, "schemes": SCHEMES})
_NAMED = re.compile(r"`(sparsync\.[\w.]+)`")


def pages() -> dict[str, str]:
    """Return all pages by their paths in the site."""
    return {page_of(room): page(room) for room in NAMES}


def page_of(room: str) -> str:
    """Return the path of a room's page.

    Example:
        >>> page_of("oktopk")
        'papers/oktopk/index.md'
    """
    return f"papers/{room}/index.md"


def page(room: str) -> str:
    """Return the page of a room."""
    title, _, summary = (inspect.getdoc(_module(room)) or "").partition(": ")
    first, _, rest = summary.partition("\n\n")
    below = [f"[`{path.split('/')[1][:-3]}`](../../{path})" for path in pages_below(room)]
    blocks = [
        f"# {title}",
        f"{first[0].upper()}{first[1:]}",
        f"In the code: [`{_PUBLISHED}{room}`][{_PUBLISHED}{room}]. Pages of its presets and schemes, "
        f"with costs, options and programs: {', '.join(below)}.",
        _linked_names(_with_code(as_markdown(rest))),
    ]
    return "\n\n".join(blocks) + "\n"


def room_of(kind: str, name: str) -> str | None:
    """Return the room that declares a preset or scheme, or None if the library's core does.

    Example:
        >>> room_of("algorithms", "gtopk"), room_of("schemes", "diloco")
        ('baselines', None)
    """
    return next((room for room in NAMES if name in _module(room).ROWS.get(kind, {})), None)


def pages_below(room: str) -> list[str]:
    """Return the paths of the pages of a room's presets and schemes."""
    return [f"{kind}/{name}.md" for kind in _TABLES for name in _module(room).ROWS.get(kind, {})]


def pointer(kind: str, name: str) -> list[str]:
    """Return the line that links a preset's or scheme's page to the page of its room, if it has one."""
    room = room_of(kind, name)
    if room is None:
        return []
    link = f"[{NAMES[room]}](../{page_of(room)})"
    return [
        f"**The paper's page:** {link}: its terms, all differences and their reasons, and figures."
    ]


def called(name: str) -> list[str]:
    """Return the line that lists the aliases of a preset or scheme, if there are any.

    Example:
        >>> called("redsync-quantized")[0]
        '**Also called:** `Quantized-RGC`, `quant RGC`, `redsync-quantised`'
    """
    more = [f"`{alias}`" for alias, row in ALIASES.items() if row == name]
    return [f"**Also called:** {', '.join(more)}"] if more else []


def core(kind: str) -> list[str]:
    """Return the paths of the pages on the core's presets or schemes, beginning with the overview."""
    names = [name for name in _TABLES[kind] if room_of(kind, name) is None]
    return [f"{kind}/index.md", *(f"{kind}/{name}.md" for name in names)]


def _module(room: str) -> ModuleType:
    return importlib.import_module(_PUBLISHED + room)


def _with_code(text: str) -> str:
    """Turn indented blocks of programs or commands into fenced blocks."""

    def fenced(block: re.Match[str]) -> str:
        code = inspect.cleandoc(block[0])
        return f"```{'console' if code.startswith('sparsync ') else 'python'}\n{code}\n```\n"

    return re.sub(r"(?:^ {4}.*\n(?:\n(?= {4}))*)+", fenced, text + "\n", flags=re.MULTILINE)


def _linked_names(text: str) -> str:
    """Turn the full names of modules, classes and functions into links to the API."""
    modules = reference.modules()
    shown = {
        f"{module}.{name}": module
        for module, path in modules.items()
        for name in reference.defined(path)
    }

    def link(name: re.Match[str]) -> str:
        module, _, attribute = name[1].rpartition(".")
        if name[1] in modules:
            return f"[{name[0]}][{name[1]}]"
        found = getattr(importlib.import_module(module), attribute)
        home = f"{getattr(found, '__module__', module)}.{attribute}"
        return f"[{name[0]}][{home}]" if home in shown else name[0]

    return linked(_NAMED.sub(link, text))
