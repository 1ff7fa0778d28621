"""Complete the site: add the pages that the code writes, complete the navigation, and insert links.

* ``on_config``: reads the addresses of the site and the repository from ``pyproject.toml``, and puts
  every page into the navigation: unlisted pages of ``docs/`` under ``REST``, and pages that the code
  writes into the sections that ``SECTIONS`` names;
* ``on_files``: adds a page for each paper's room, algorithm, averaging scheme and API package;
* ``on_page_markdown``: turns the name of another page (``docs/NAME.md``) or of a room into a link.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_pages import algorithms, reference, rooms, schemes

REST = "Reference"

SECTIONS: Mapping[str, str] = {
    "Gradients": "algorithms",
    "Updates and averages": "schemes",
    "Ok-Topk": "oktopk",
    "SparCML": "sparcml",
    "RedSync": "redsync",
    "WAGMA": "wagma",
    "Baselines": "baselines",
    "API": "api",
}
"""What fills each section of the navigation: the core's presets or schemes, a room, or the API."""

_NAMED = re.compile(r"(?<![\[`])`(?:docs/([\w-]+\.md)|sparsync\.published\.(\w+))`(?!`)")
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation, and set the addresses of the site and the repository."""
    named = addresses()
    config.site_url, config.repo_url = named["Documentation"], named["Repository"]
    config.repo_name = "/".join(named["Repository"].split("/")[-2:])
    present = sorted(path.name for path in Path(config.docs_dir).glob("*.md"))
    config.nav = complete(config.nav or [], present, sections())
    return config


def addresses() -> dict[str, str]:
    """Return ``[project.urls]`` of ``pyproject.toml``, the only file that states these addresses."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    table = text.split("[project.urls]")[1].split("[project.scripts]")[0]
    return dict(re.findall(r'^(\w+) = "(.*)"$', table, re.MULTILINE))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that the code writes."""
    for path, content in generated().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the names of documents in a page into links."""
    known = {file.src_uri for file in files.documentation_pages()}
    return link_documents(markdown, page.file.src_uri, known)


def generated() -> dict[str, str]:
    """Return the pages that the code writes, by path. They are made only once per process."""
    if not _made:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the examples use thousands of small vectors
        for part in (rooms, algorithms, schemes, reference):
            _made.update(part.pages())
        torch.set_num_threads(threads)
    return _made


_made: dict[str, str] = {}


def complete(nav: list[Any], present: list[str], sections: Mapping[str, list[str]]) -> list[Any]:
    """Return the navigation with every existing page, and without entries for missing pages.

    Args:
        nav: the navigation from ``mkdocs.yml``.
        present: names of the files in ``docs/``.
        sections: paths of the pages that the code writes, by section title.
    """
    listed = set(_pages_of(nav))
    others = [name for name in present if name not in listed]

    def filled(title: str, content: Any) -> Any:
        if isinstance(content, str):
            return content if content in present else None
        inner = [item if isinstance(item, str) else _entry(filled, item) for item in content]
        kept = [item for item in inner if item and (isinstance(item, dict) or item in present)]
        first, *more = sections.get(title) or [None]  # the section's index page comes first
        return [p for p in [first, *kept, *more, *(others if title == REST else [])] if p]

    return [entry for item in nav if (entry := _entry(filled, item))]


def _entry(filled: Callable[[str, Any], Any], item: Mapping[str, Any]) -> dict[str, Any] | None:
    ((title, content),) = item.items()
    content = filled(title, content)
    return {title: content} if content else None


def sections() -> dict[str, list[str]]:
    """Return the paths of the pages that the code writes, by section title."""
    return {title: _pages_in(what) for title, what in SECTIONS.items()}


def _pages_in(what: str) -> list[str]:
    if what == "api":
        return list(reference.pages())
    if what in rooms.NAMES:
        return [rooms.page_of(what), *rooms.pages_below(what)]
    return rooms.core(what)


def _pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        content = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(content, list):
            yield from _pages_of(content)
        else:
            yield content


def link_documents(markdown: str, source: str, known: set[str]) -> str:
    """Turn the names of documents into links, except in fenced code.

    Args:
        markdown: the text of a page.
        source: the page's path in the site.
        known: paths of all pages.
    """
    here = posixpath.dirname(source)

    def link(name: re.Match[str]) -> str:
        page = name[1] or rooms.page_of(name[2])
        if page not in known or page == source:
            return name[0]
        return f"[{name[0]}]({posixpath.relpath(page, here or '.')})"

    pieces = _FENCED.split(markdown)
    pieces[::2] = [_NAMED.sub(link, piece) for piece in pieces[::2]]
    return "".join(pieces)
