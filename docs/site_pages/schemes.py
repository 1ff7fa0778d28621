"""Write one page per averaging scheme, and the table of all schemes."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any, get_type_hints

import torch

from site_pages import docstrings, rooms
from site_pages.examples import output_of, scheme_program
from site_pages.tables import ROOT, linked, scheme_rows, table_row
from sparsync import simulate
from sparsync.algorithm import Algorithm
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.transports.sim import SimCommunicator
from sparsync.updates import OuterAverager, OuterStep

__all__ = ["overview", "page", "pages"]

_SIZE = 8_192  # elements of the model whose bytes are counted
_STEPS = 8  # number of counted steps if the scheme has no period
_COMPUTE = 0.1  # virtual seconds per step, the same on all ranks
_SETTLED = 10.0  # virtual seconds after which no message is in flight
_RANKS = (8, 64)
_GUIDE = (ROOT / "docs" / "averaging.md").read_text(encoding="utf-8")


def pages() -> dict[str, str]:
    """Return all pages by their paths in the site."""
    made = {f"schemes/{name}.md": page(name) for name in SCHEMES}
    return {"schemes/index.md": overview(), **made}


def overview() -> str:
    """Return the table of all schemes."""
    rows = [
        table_row("scheme", "from", "models sent per rank and step", "who waits for whom"),
        table_row(*["---"] * 4),
    ]
    for name in SCHEMES:
        origin, _, waits = (linked(cell) for cell in scheme_rows()[name])
        sent = " / ".join(f"{_models_sent(name, ranks):.3g}" for ranks in _RANKS)
        rows.append(table_row(f"[`{name}`]({name}.md)", origin, sent, waits))
    return "\n".join(
        [
            "# Averaging schemes",
            "",
            "Every rank trains its own model, and models are averaged ([how, and when to use it]"
            "(../averaging.md)). The table shows the most that any rank sends or receives per step, in "
            "models of n elements, counted on 8 / 64 virtual ranks over a period with each scheme's "
            "defaults.",
            "",
            *rows,
            "",
        ]
    )


def page(name: str) -> str:
    """Return the page of one scheme."""
    scheme = _class(name)
    origin, volume, waits = (linked(cell) for cell in scheme_rows()[name])
    documented = docstrings.parts(scheme)
    _, *more = documented[""].split("\n\n")
    program = scheme_program(name)
    rows = [table_row("P", "models sent per rank and step"), table_row("---", "---")]
    rows += [table_row(ranks, f"{_models_sent(name, ranks):.3g}") for ranks in _RANKS]
    blocks = [
        f"# {name}",
        docstrings.summary(scheme),
        f"**From:** {origin}",
        *rooms.called(name),
        *rooms.pointer("schemes", name),
        *map(docstrings.as_markdown, more),
        "## Cost",
        f"**Sent per rank and step, models of n elements:** {volume}",
        f"**Who waits:** {waits}",
        _sorted(name),
        f"**In full:** {docstrings.as_markdown(documented['Cost'])}",
        "Counted on virtual ranks over a period, with the defaults below:",
        "\n".join(rows),
        "## When to use it",
        *_guide(name),
        "[Averages, or sparse gradients?](../averaging.md#averages-or-sparse-gradients)",
        "## Differs from the paper",
        docstrings.as_markdown(documented["Differs from the paper"]),
        "## Options",
        _options(name),
        "## Example",
        "In a training script, with any optimizer:",
        f"```python\n{_usage(name)}```",
        "On virtual ranks, with a different rank late on every step, and the program's output:",
        f"```python\n{program}```",
        f"```text\n{output_of(program)}```",
        "## References",
        linked(docstrings.as_markdown(documented["References"])),
    ]
    return "\n\n".join(blocks) + "\n"


def _sorted(name: str) -> str:
    """Return a scheme's classification according to Table I of WAGMA-SGD."""
    averager = SCHEMES[name]()
    period = averager.global_period
    often = {None: "only at the end", 1: "on every step"}.get(period, f"every {period} steps")
    sizes = " / ".join(str(averager.effective_group_size(ranks)) for ranks in _RANKS)
    table = f"../{rooms.page_of('wagma')}#table-i-for-every-scheme-here"
    return (
        f"**Averages:** {averager.averaged}; S = {sizes} of {_RANKS[0]} / {_RANKS[1]} ranks; staleness: "
        f"{averager.staleness}; over all ranks {often} ([Table I]({table}))"
    )


def _class(name: str) -> type[Any]:
    """Return the class whose docstring describes a scheme and its settings."""
    made: Any = SCHEMES[name]
    if inspect.isfunction(made):
        made = get_type_hints(made)["return"]
    found: type[Any] = made.func if isinstance(made, functools.partial) else made
    # the scheme's settings are the arguments of OuterStep
    return OuterStep if found is OuterAverager else found


def _guide(name: str) -> list[str]:
    """Return the section of the guide (``docs/averaging.md``) whose heading names a scheme."""
    for heading, text in re.findall(r"^### ([^\n]+)\n\n(.*?)(?=\n#|\Z)", _GUIDE, re.M | re.S):
        if name in heading.split(", "):
            return [text.strip()]
    raise KeyError(f"docs/averaging.md has no section ### {name}")


def _options(name: str) -> str:
    said = docstrings.arguments(_class(name))
    rows = [table_row("option", "default", "meaning"), table_row(*["---"] * 3)]
    for option, default in options_of(name).items():
        shown = (
            f"an `Algorithm`, {default.name}"
            if isinstance(default, Algorithm)
            else f"`{default!r}`"
        )
        rows.append(table_row(f"`{option}`", shown, said.get(option, "")))
    return "\n".join(rows) if len(rows) > 2 else "None of its own."


def _usage(name: str) -> str:
    return (
        "from sparsync.averaging.schemes import SCHEMES\n\n"
        f'with SCHEMES["{name}"](model) as averager:  # a plain module, equal on all ranks\n'
        "    for inputs, targets in loader:\n"
        "        optimizer.zero_grad()\n"
        "        loss_function(model(inputs), targets).backward()\n"
        "        optimizer.step()\n"
        "        averager.step()\n"
    )


@functools.cache
def _models_sent(name: str, world_size: int) -> float:
    """Return how many models the busiest rank sends or receives per step, averaged over a period."""
    options = options_of(name)
    steps = options.get("period") or options.get("sync_period") or _STEPS

    async def program(comm: SimCommunicator) -> None:
        averager, model = SCHEMES[name](), torch.zeros(_SIZE)
        noise = torch.randn(_SIZE, generator=torch.Generator().manual_seed(comm.rank))
        await averager.begin(comm, model, 0)
        for step in range(steps):
            await comm.compute(_COMPUTE)
            model = await averager.average(comm, model + noise, step)
        await comm.compute(_SETTLED)

    totals = [ledger.total() for ledger in simulate(program, world_size).ledgers]
    most = max(max(total.sent, total.received) for total in totals)
    return most / steps / (_SIZE * torch.float32.itemsize)
