"""A griffe extension that converts this library's docstrings for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

from site_pages.docstrings import as_markdown

__all__ = ["Docstrings"]

_LABEL = re.compile(r"(?:^|(?<=   ))(Cost|State|Differs from the paper|References):(?=[ \n])", re.M)


class Docstrings(Extension):
    """Converts reStructuredText marks to Markdown, examples to code, and labels to bold text."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Convert the docstring of one object."""
        if obj.docstring is None:
            return
        text = as_markdown(obj.docstring.value)
        text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
        obj.docstring.value = _LABEL.sub(r"\n**\1:**", text)
