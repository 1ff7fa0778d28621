"""Write one page per preset, and the table of all presets."""

from __future__ import annotations

import inspect
from types import MappingProxyType
from typing import Any

from site_pages import docstrings, rooms
from site_pages.choosing import NETWORKS, machine_on
from site_pages.examples import algorithm_program, output_of
from site_pages.tables import algorithm_rows, linked, table_row
from sparsync.algorithm import Algorithm, Preset
from sparsync.collectives.costs import Job
from sparsync.cost.planner import bound_words, plan, predict
from sparsync.cost.wording import format_bandwidth
from sparsync.presets import PRESETS, preset, resolve
from sparsync.selection import Everything

__all__ = ["attach_line", "overview", "page", "pages"]

_SIZE = 14_728_266  # VGG-16 on CIFAR-10, as in Ok-Topk's table 1
_K = 147_283  # 1 %
_RANKS = (8, 64)
_UNPREDICTABLE = "it runs whichever algorithm the plan chooses"
_BOUNDS = MappingProxyType(
    {"top-k": "Theorem 3.1", "sum": "Lemmas 5.1 and 5.2", "whole": "Lemma 5.1 where k = n"}
)


def pages() -> dict[str, str]:
    """Return all pages by their paths in the site."""
    made = {f"algorithms/{name}.md": page(name) for name in PRESETS}
    return {"algorithms/index.md": overview(), **made}


def overview() -> str:
    """Return the table of all presets, sorted by the volume that they send on eight ranks."""
    head = [
        table_row("name", "from", "words per k", "messages", "speed-up over dense, 1 Gbit/s"),
        table_row(*["---"] * 5),
    ]
    names = sorted(PRESETS, key=lambda name: (_candidate(name) is None, _volume(name), name))
    rows = [table_row(f"[`{name}`]({name}.md)", *_overview_cells(name)) for name in names]
    return "\n".join(
        [
            "# Algorithms",
            "",
            f"Predicted for n = {_SIZE:,} elements, k = {_K:,} (density 1 %), on 8 / 64 ranks: the "
            "volume that the busiest rank sends or receives, in words of 4 bytes per selected entry; "
            "the number of messages that it sends one after the other; and the speed-up of a step over "
            "dense, if each rank has its own core ([the model](../planning.md#the-model)).",
            "",
            *head,
            *rows,
            "",
            "A preset is a named combination of a selector, a collective and a codec, with its paper's "
            "constants. [Choosing](../choosing.md) says which preset suits which network. "
            "[Schemes](../schemes/index.md) average models instead of gradients.",
            "",
        ]
    )


def page(name: str) -> str:
    """Return the page of one preset."""
    algorithm = resolve(name)
    origin, volume, remark = (linked(cell) for cell in algorithm_rows()[name])
    row = preset(name)
    documented = docstrings.parts(row.make)
    _, *more = documented[""].split("\n\n")
    blocks = [
        f"# {name}",
        docstrings.summary(row.make),
        f"**From:** {origin}" + (f"\n\n**In short:** {remark}" if remark else ""),
        *rooms.called(name),
        *rooms.pointer("algorithms", name),
        *map(docstrings.as_markdown, more),
        _parts(algorithm),
        "## Cost",
        f"**Volume per rank and step, words:** {volume}",
        *_cost(name, algorithm),
        "## When to use it",
        *_when(name),
        "## Differs from the paper",
        *_labelled(algorithm, "Differs from the paper"),
        "## Options",
        _options(name, algorithm),
        "## Example",
        *_example(name, algorithm),
        "## References",
        *_references(name, algorithm),
    ]
    return "\n\n".join(blocks) + "\n"


def attach_line(name: str) -> str:
    """Return the line with which a training script attaches this preset."""
    algorithm = resolve(name)
    density = "" if algorithm.make_selector is Everything else ", density=0.01"
    momentum = ", correction=sparsync.Correction(momentum=0.9)" if preset(name).corrects else ""
    return f'sync = sparsync.attach(ddp_model, algorithm="{name}"{density}{momentum})'


# ---- parts ------------------------------------------------------------------------------------------


def _classes(algorithm: Algorithm) -> list[type]:
    """Return the classes of the selector, of any selectors that it wraps, and of the collective."""
    made: list[Any] = [algorithm.make_selector()]
    while hasattr(made[-1], "make_selector"):
        made.append(made[-1].make_selector())
    return [type(part) for part in [*made, algorithm.make_collective()]]


def _codec(algorithm: Algorithm) -> str:
    collective = algorithm.make_collective()
    found = [
        repr(c)
        for c in (getattr(collective, "local", None), getattr(collective, "codec", None))
        if c
    ]
    return f"`{'`, then `'.join(found)}`" if found else "none of its own"


def _parts(algorithm: Algorithm) -> str:
    rows = [table_row("part", "what it does"), table_row("---", "---")]
    for part in _classes(algorithm):
        rows.append(table_row(_reference(part), docstrings.summary(part)))
    rows.append(table_row("codec", f"{_codec(algorithm)} ([wire format](../wire-format.md))"))
    return "\n".join(rows)


def _reference(part: type) -> str:
    return f"[`{part.__name__}`][{part.__module__}.{part.__name__}]"


def _labelled(algorithm: Algorithm, label: str) -> list[str]:
    said = [(part, docstrings.parts(part).get(label, "")) for part in _classes(algorithm)]
    return [f"{_reference(part)}: {docstrings.as_markdown(text)}" for part, text in said if text]


def _references(name: str, algorithm: Algorithm) -> list[str]:
    said = [docstrings.parts(part).get("References") for part in _classes(algorithm)]
    return [
        f"- {linked(docstrings.as_markdown(text))}" for text in dict.fromkeys(said) if text
    ] or ["None: this algorithm is sparsync's own."]


# ---- cost -------------------------------------------------------------------------------------------


def _cost(name: str, algorithm: Algorithm) -> list[str]:
    said = _labelled(algorithm, "Cost")
    candidate = _candidate(name)
    if candidate is None:
        return [*said, f"There is no closed form for this preset: {_UNPREDICTABLE}."]
    rows = [
        table_row("P", "words", "words per k", "messages", "turns", "lower bound, words"),
        table_row(*["---"] * 6),
    ]
    for ranks in _RANKS:
        job = Job(_SIZE, _K, ranks)
        cost = candidate.cost(job)
        words = _words(name, ranks)
        cells = (
            f"{words:,.0f}",
            f"{words / _K:.2f}",
            f"{cost.messages:.3g}",
            f"{cost.turns:.3g}",
        )
        rows.append(table_row(ranks, *cells, f"{bound_words(candidate.result, job):,.0f}"))
    return [
        *said,
        f"The table evaluates the closed form ({linked(candidate.source)}) for n = {_SIZE:,} and "
        f"k = {_K:,}, for the busiest rank, in words of 4 bytes; "
        f"the bound comes from {_BOUNDS[candidate.result]}. "
        "A turn is a wait for other ranks that follows a rank's own work "
        "([the model](../planning.md#the-model)).",
        "\n".join(rows),
    ]


def _words(name: str, ranks: int) -> float:
    return resolve(name).cost(Job(_SIZE, _K, ranks)).words


def _candidate(name: str) -> Algorithm | None:
    """Return a preset's algorithm, or None if it declares no cost."""
    algorithm = resolve(name)
    return algorithm if algorithm.predictable else None


def _volume(name: str) -> float:
    return _words(name, 8) if _candidate(name) else 0.0


def _gain(name: str, network: str, ranks: int) -> float:
    """Return the predicted speed-up of a step over dense."""
    machine = machine_on(network)
    dense, made = (
        predict(resolve(collective), size=_SIZE, k=_K, world_size=ranks, machine=machine)
        for collective in ("dense", name)
    )
    return dense.seconds / made.seconds


def _overview_cells(name: str) -> list[str]:
    origin = linked(algorithm_rows()[name][0])
    candidate = _candidate(name)
    if candidate is None:
        return [origin, *["depends on the choice"] * 3]
    costs = [candidate.cost(Job(_SIZE, _K, ranks)) for ranks in _RANKS]
    return [
        origin,
        " / ".join(f"{_words(name, ranks) / _K:.3g}" for ranks in _RANKS),
        " / ".join(f"{cost.messages:.3g}" for cost in costs),
        " / ".join(f"{_gain(name, '1 Gbit/s', ranks):.2g} x" for ranks in _RANKS),
    ]


def _when(name: str) -> list[str]:
    if name == "dense":
        return [
            "Use it if the network is faster than selection; [the tables](../choosing.md) show when "
            "this is the case. All other algorithms are compared with it."
        ]
    if _candidate(name) is None:
        return [
            f"No prediction is possible for this preset alone: {_UNPREDICTABLE}. "
            "[The tables](../choosing.md) show its choices on typical networks."
        ]
    rows = [table_row("network", *(f"P = {ranks}" for ranks in _RANKS)), table_row(*["---"] * 3)]
    for network in NETWORKS:
        gains = [_gain(name, network, ranks) for ranks in _RANKS]
        rows.append(
            table_row(network, *(f"{g:.2g} x" if g > 1 else f"**{g:.2g} x**" for g in gains))
        )
    return [
        f"{_limits(name)} The table shows the predicted speed-up of a step over dense at a density of "
        "1 % (bold: do not use this preset there):",
        "\n".join(rows),
        "If several algorithms are faster than dense, [the tables](../choosing.md) name the fastest. "
        "These predictions were [compared with measurements](../planning.md#how-well-it-predicts).",
    ]


def _limits(name: str) -> str:
    """Return a sentence that says up to which bandwidth a preset is faster than dense."""
    limits = []
    for ranks in _RANKS:
        machine = machine_on("1 Gbit/s")
        candidates = [resolve(one) for one in ("dense", name)]
        rate = plan(_SIZE, ranks, machine, candidates, k=_K).break_even_bandwidth
        # the planner compares dense only with sparse algorithms
        if candidates[1].result == "whole":
            gains = [_gain(name, network, ranks) > 1 for network in NETWORKS]
            return "Every element is sent." if any(gains) else "Dense is as fast, or faster."
        at = "at any" if rate is None else f"below {format_bandwidth(rate)}" if rate else "at no"
        limits.append(f"{at}{'' if rate else ' bandwidth'} on {ranks} ranks")
    return (
        f"A step is predicted to be faster than dense {' and '.join(limits)}, at 50 µs per message."
    )


# ---- options and example ----------------------------------------------------------------------------


def _options(name: str, algorithm: Algorithm) -> str:
    collective = type(algorithm.make_collective())
    row = preset(name)
    said = {**docstrings.arguments(collective), **docstrings.arguments(row.make)}
    rows = [table_row("option", "default", "meaning"), table_row(*["---"] * 3)]
    for parameter in row.options.values():
        default = f"`{_default(row, algorithm, parameter)!r}`"
        rows.append(table_row(f"`{parameter.name}`", default, said.get(parameter.name, "")))
    return "\n".join(rows) if row.options else "None."


def _default(row: Preset, algorithm: Algorithm, parameter: inspect.Parameter) -> Any:
    """Return an option's default, which may differ between the preset and its collective."""
    if parameter.name in inspect.signature(row.make).parameters:
        return parameter.default
    passed = getattr(algorithm.make_collective(), parameter.name, parameter.default)
    return passed if isinstance(passed, str | float | int | None) else parameter.default


def _example(name: str, algorithm: Algorithm) -> list[str]:
    program = algorithm_program(name)
    shown = [
        "In a training script:",
        f"```python\n{attach_line(name)}\n```",
        "One step on virtual ranks, and its output:",
        f"```python\n{program}```",
        f"```text\n{output_of(program)}```",
    ]
    if preset(name).corrects:
        shown.insert(2, "with an optimizer that has no momentum of its own.")
    return shown
