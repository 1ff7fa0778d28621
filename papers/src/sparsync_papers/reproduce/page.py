"""Write all outcomes on one self-contained HTML page: plots inside, no script."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from sparsync_papers.reproduce import Comparison, Unavailable
from sparsync_papers.reproduce.report import Finished, answer, table_of

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }
th, td { border: 1px solid var(--line); padding: 0.3rem 0.6rem; text-align: left;
  vertical-align: top; }
th { background: var(--soft); }
.wide { overflow-x: auto; }
.no { font-weight: bold; }
.where { opacity: 0.75; }
img { max-width: 100%; background: white; padding: 0.5rem; box-sizing: border-box; }
summary { cursor: pointer; }
"""
_COMPARED = ("What", "Paper", "This run", "Same conclusion?")


def page(finished: Sequence[Finished], unavailable: Sequence[Unavailable]) -> str:
    """Write the page: the table of all comparisons first, then every artifact.

    Example:
        >>> page([], []).startswith("<!doctype html>")
        True
    """
    missing = [(escape(u.what), escape(u.paper), escape(u.reason)) for u in unavailable]
    body = [
        "<h1>The papers, reproduced</h1>",
        f"<p>{escape(_summary(finished))}</p>",
        "<h2>Paper, this run, same conclusion?</h2>",
        _overview(finished),
        *map(_section, finished),
        '<h2 id="missing">What cannot be done here</h2>',
        _table(("What", "Paper", "Why not"), missing),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>The papers, reproduced</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _summary(finished: Sequence[Finished]) -> str:
    """Count conclusions and failures in one sentence."""
    compared = [c for f in finished if f.outcome for c in f.outcome.comparisons]
    same, failed = sum(c.same for c in compared), sum(f.outcome is None for f in finished)
    text = f"{len(finished)} artifacts, {same} of {len(compared)} conclusions are the papers'"
    if failed:
        text += f"; {failed} failed"
    if any(f.quick for f in finished):
        text += "; scaled down to run in seconds, so nothing is said about the papers"
    return f"{text}."


def _overview(finished: Sequence[Finished]) -> str:
    lines: list[tuple[str, ...]] = []
    for run in finished:
        name = escape(run.artifact.name)
        link = f'<a href="#{name}">{name}</a>'
        if run.outcome is None:
            lines.append((link, "", "", "", f'<span class="no">failed</span>: {escape(run.error)}'))
            continue
        lines += [(link, *_compared(c)) for c in run.outcome.comparisons]
    return _table(("Artifact", *_COMPARED), lines)


def _compared(comparison: Comparison) -> tuple[str, str, str, str]:
    stated = comparison.stated
    said, _, why = answer(comparison).partition(":")
    return (
        escape(stated.what),
        f'{escape(stated.says)} <span class="where">({escape(stated.where)})</span>',
        escape(comparison.ours),
        f'<span class="{said}">{said}</span>' + (f":{escape(why)}" if why else ""),
    )


def _section(run: Finished) -> str:
    name, title = escape(run.artifact.name), escape(run.artifact.title)
    heading = f'<h2 id="{name}">{name}: {title} ({escape(run.artifact.paper)})</h2>'
    if run.outcome is None:
        return f'{heading}\n<p class="no">Failed: {escape(run.error)}</p>'
    *before, settings, differs = (f"<p>{escape(note)}</p>" for note in run.notes(run.outcome))
    picture = ""
    if run.picture is not None:
        data = base64.b64encode(run.picture).decode("ascii")
        picture = f'<img alt="{title}" src="data:image/png;base64,{data}">'
    columns, lines = table_of(run.outcome)
    numbers = _table(map(escape, columns), [map(escape, line) for line in lines])
    return "\n".join(
        [
            heading,
            *before,
            picture,
            _table(_COMPARED, map(_compared, run.outcome.comparisons)),
            settings,
            differs,
            f"<details><summary>All numbers</summary>{numbers}</details>",
        ]
    )


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Write a table; cells are HTML already."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    rows = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines]
    return f'<div class="wide"><table><tr>{heads}</tr>\n' + "\n".join(rows) + "\n</table></div>"
