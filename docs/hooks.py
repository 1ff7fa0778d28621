"""What MkDocs does beyond ``mkdocs.yml``: pages that the code writes, the rest of the navigation, links.

* ``on_config``: every page of ``docs/`` is in the navigation, those that nobody listed under Guides;
* ``on_files``: a page per algorithm, per scheme of averaging and per package of the API;
* ``on_page_markdown``: where a page names another one as ``docs/NAME.md``, that is a link.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_pages import algorithms, reference, schemes

GENERATED = {"Algorithms": "algorithms", "Averaging": "schemes", "API": "api"}
REST = "Guides"

_NAMED = re.compile(r"(?<![\[`])`docs/([\w-]+\.md)`(?!`)")
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation."""
    present = sorted(path.name for path in Path(config.docs_dir).glob("*.md"))
    config.nav = complete(config.nav or [], present, generated())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that the code writes."""
    for path, content in generated().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the documents that a page names."""
    known = {file.src_uri for file in files.documentation_pages()}
    return link_documents(markdown, page.file.src_uri, known)


def generated() -> dict[str, str]:
    """Return the pages that the code writes, by their paths; made once per process."""
    if not _made:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # thousands of small vectors, on virtual ranks
        for part in (algorithms, schemes, reference):
            _made.update(part.pages())
        torch.set_num_threads(threads)
    return _made


_made: dict[str, str] = {}


def complete(nav: list[Any], present: list[str], written: dict[str, str]) -> list[Any]:
    """Return the navigation without pages that are not there, and with all that are.

    Args:
        nav: of ``mkdocs.yml``.
        present: names of the files in ``docs/``.
        written: pages that the code writes, by path.
    """
    listed = set(_pages_of(nav))
    others = [name for name in present if name not in listed]
    result = []
    for entry in nav:
        ((title, content),) = entry.items()
        if isinstance(content, list):
            content = [item for item in content if all(p in present for p in _pages_of([item]))]
            folder = GENERATED.get(title)
            content += [p for p in written if folder and posixpath.dirname(p) == folder]
            content += others if title == REST else []
        if content:
            result.append({title: content})
    return result


def _pages_of(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        content = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(content, list):
            yield from _pages_of(content)
        else:
            yield content


def link_documents(markdown: str, source: str, known: set[str]) -> str:
    """Turn the names of documents into links, outside of fenced code.

    Args:
        markdown: of a page.
        source: its path in the site.
        known: paths of all pages.
    """
    here = posixpath.dirname(source)

    def link(name: re.Match[str]) -> str:
        if name[1] not in known or name[1] == source:
            return name[0]
        return f"[{name[0]}]({posixpath.relpath(name[1], here or '.')})"

    pieces = _FENCED.split(markdown)
    pieces[::2] = [_NAMED.sub(link, piece) for piece in pieces[::2]]
    return "".join(pieces)
