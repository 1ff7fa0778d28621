"""All outcomes on one HTML page that needs nothing beside it: plots inside, no script."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from sparsync.reproduce.base import Comparison, Outcome, Unavailable
from sparsync.reproduce.report import Finished, format_cell, verdict

__all__ = ["page"]

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


def page(finished: Sequence[Finished], unavailable: Sequence[Unavailable]) -> str:
    """Write the page: the table "paper, ours, same conclusion?" first, then every artifact.

    Example:
        >>> page([], []).startswith("<!doctype html>")
        True
    """
    missing = _table(
        ("What", "Paper", "Why not"),
        [(escape(u.what), escape(u.paper), escape(u.reason)) for u in unavailable],
    )
    body = [
        "<h1>The papers, reproduced</h1>",
        f"<p>{escape(_summary(finished))}</p>",
        "<h2>Paper, ours, same conclusion?</h2>",
        _overview(finished),
        *map(_section, finished),
        '<h2 id="missing">What cannot be done here</h2>',
        missing,
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
    quick = "; scaled down to run in seconds, so nothing is said about the papers"
    return (
        text
        + (f"; {failed} failed" if failed else "")
        + quick * any(f.quick for f in finished)
        + "."
    )


def _overview(finished: Sequence[Finished]) -> str:
    lines: list[tuple[str, ...]] = []
    for run in finished:
        name = run.artifact.name
        link = f'<a href="#{escape(name)}">{escape(name)}</a>'
        if run.outcome is None:
            lines.append((link, "", "", "", f'<span class="no">failed</span>: {escape(run.error)}'))
            continue
        lines += [(link, *_compared(c)) for c in run.outcome.comparisons]
    return _table(("Artifact", "What", "Paper", "Ours", "Same conclusion?"), lines)


def _compared(comparison: Comparison) -> tuple[str, str, str, str]:
    stated, answer = comparison.stated, verdict(comparison)
    reason = f": {escape(comparison.why)}" if comparison.why else ""
    return (
        escape(stated.what),
        f'{escape(stated.says)} <span class="where">({escape(stated.where)})</span>',
        escape(comparison.ours),
        f'<span class="{answer}">{answer}</span>{reason}',
    )


def _section(run: Finished) -> str:
    artifact = run.artifact
    heading = (
        f'<h2 id="{escape(artifact.name)}">{escape(artifact.name)}: {escape(artifact.title)}</h2>'
    )
    if run.outcome is None:
        return f'{heading}\n<p class="no">Failed: {escape(run.error)}</p>'
    outcome = run.outcome
    remark = f'<p class="no">Quick: {escape(run.remark)}.</p>' if run.remark else ""
    settings = ", ".join(f"{name} {format_cell(value)}" for name, value in outcome.settings.items())
    return "\n".join(
        [
            heading,
            f"<p>{escape(artifact.paper)}. Its conclusion: {escape(artifact.conclusion)}.</p>",
            remark,
            _picture(run),
            _table(
                ("What", "Paper", "Ours", "Same conclusion?"), map(_compared, outcome.comparisons)
            ),
            f"<p>Settings: {escape(settings)}; seed {run.seed}; {run.seconds:.0f} s.</p>",
            f"<p>Differs from the paper: {escape(outcome.differs)}</p>",
            f"<details><summary>All numbers</summary>{_numbers(outcome)}</details>",
        ]
    )


def _picture(run: Finished) -> str:
    if run.picture is None:
        return ""
    data = base64.b64encode(run.picture).decode("ascii")
    return f'<img alt="{escape(run.artifact.title)}" src="data:image/png;base64,{data}">'


def _numbers(outcome: Outcome) -> str:
    columns = list(dict.fromkeys(key for row in outcome.rows for key in row))
    lines = [[escape(format_cell(row.get(column))) for column in columns] for row in outcome.rows]
    return _table(tuple(map(escape, columns)), lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Write a table; cells are HTML already."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    rows = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines]
    return f'<div class="wide"><table><tr>{heads}</tr>\n' + "\n".join(rows) + "\n</table></div>"
