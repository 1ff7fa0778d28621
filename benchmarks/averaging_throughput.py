"""Simulate the throughput of the averaging schemes in virtual time: WAGMA's Figures 4, 7 and 10.

    python benchmarks/averaging_throughput.py              (half an hour; writes averaging-*)
    python benchmarks/averaging_throughput.py --only fig4  (only runs with "fig4" in their name)

Finished runs are stored in the .json and not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

from rich.progress import track

from sparsync_papers.reproduce.wagma_throughput import (
    ALPHA,
    BETA,
    COMPUTE,
    ROWS,
    SETTINGS,
    SIZE,
    TARGETS,
    TRANSFORMER_COMPUTE,
    VARIANTS,
    ideal_seconds,
    step_seconds,
)

TEXT = """# Throughput of the averaging schemes, in virtual time

`python benchmarks/averaging_throughput.py`: the schemes of `sparsync.averaging` on the simulator's
virtual ranks, {size} elements in place of the model, on links that are slower by the same factor.
Computation and network are derived from the paper (section 5.2, 64 ranks, none late). A step of AD-PSGD,
which hides all communication, consists of computation, {compute:.3f} s; the additional time of local
SGD's step is an allreduce, so beta = {beta:.3f} ns per byte; alpha = {alpha:g} us is ours. Figure 7:
{fig7} s per mean batch is ours (the paper gives none; with 0.1 s WAGMA is 1.80 x local SGD at 16 ranks),
times our lines' relative cost. In Figure 10, the heavy tail is the whole computation of a step. Seconds
per step are the mean over ranks and steps: 120 for D-PSGD, SGP and AD-PSGD; for the others 80 to 64
ranks, 40 above, 24 at 1,024. *Ideal*: the mean computation over 120 steps, delays included, no waiting,
no communication.

## Against the paper

WAGMA's throughput relative to the others'; *in italics*: conditions that the paper's runs may have had
(see below); *half*: Figure 4 with half the batch, for which section 5.2 compares training times.

{targets}

Without delays (*Control* below), the schemes that the paper compares there, and both variants of
eager-SGD, are within 7 % of each other; SGP with 4 neighbours, which the paper does not include, is 9 %
above SGP with 1.

What two late ranks per step add to a step of Figure 4 at 64 ranks, in ms (of 320):

{paid}

**Why D-PSGD and SGP are better here than in the paper.** A rank waits only for its neighbours in the
current step, so a delay travels one hop per step, and delays of distant ranks overlap: the schemes pay
for only a small part of the 320 ms. In the paper, they paid as much as local SGD: D-PSGD was 1.02 x as
fast as local SGD with delays (1.25 over 1.23) and 1.03 x without (1.57 / 1.52), whereas a scheme that
waits less would have gained. With a barrier after every step (in italics), the schemes here pay in full
as well, and the target is reached.

In Figure 10, they were 1.24 x (2.33 / 1.88) and 1.11 x as fast as local SGD in the paper, {gossip:.1f} x
and {pushed:.1f} x here. In every global average, WAGMA waits for the longest of 8 x 1,024 draws. One draw
in 5,000 is of 43.5 s, so 8 steps take {window:.0f} s, as with local SGD with H = tau, because no rank
waits in between. (D-PSGD needs long runs to spread such delays: at 256 ranks, it is 7 % slower over 480
steps than over 120.)

**Why eager-SGD is better here.** It has no global average: a late rank stays behind until it is drawn
(majority), or forever (solo), whereas WAGMA pays for its latest rank once in tau steps. If eager-SGD's
ranks also meet every tau steps (in italics), WAGMA is ahead. This does not explain everything: at 1.25 /
1.13 x local SGD's speed, a step in the paper takes 0.88 s, 0.22 s longer than a balanced step here. A
recursive doubling of the whole model (section 3.1: 6 n beta = 112 ms, compared with 37 here) explains a
third of this difference; the paper does not explain the rest.

**Why S = P costs nothing here.** Our groups of all ranks do not wait either, and their allreduce moves 2
n (S - 1) / S elements, hardly more than with 8 ranks. In the paper, S = P costs as much as local SGD
(1.24 and 1.25), as a "global collective" that waits for all ranks would. With groups that wait (in
italics), this also holds here.

**Why AD-PSGD is better here in Figure 7.** It begins no exchange before the previous one has been
answered, so it never waits for the network; in the paper, it could not hide its communication there.

{sections}
"""

STYLES = {
    "WAGMA": "C3o-", "AD-PSGD": "C7v:", "eager-SGD, solo": "C4^:", "eager-SGD, majority": "C4s-",
    "SGP, 1 neighbour": "C2^:", "SGP, 2 neighbours": "C2s-", "SGP, 4 neighbours": "C2D--",
    "D-PSGD": "C0o-", "local SGD, H = 1": "C1o-", "Allreduce-SGD": "C5x:", "local SGD, H = tau": "C1^:",
}  # fmt: skip

# (figure, ranks, row) -> WAGMA's throughput relative to the row's, in the paper
RATIOS = {(t.figure, t.ranks, row): t.ratio for t in TARGETS for row in t.rows}


def steps_of(scheme: str, world_size: int) -> int:
    """Return a run's number of steps, a multiple of every tau; gossip needs more to spread delays."""
    if scheme in ("dpsgd", "sgp", "adpsgd"):
        return 120
    return 80 if world_size <= 64 else 40 if world_size < 1024 else 24


def cases() -> Iterator[tuple[str, int, str]]:
    """Yield the figure, ranks and row of all runs, short runs first."""
    points = [(ranks, name) for name, setting in SETTINGS.items() for ranks in setting.ranks]
    for ranks, figure in sorted(points, key=lambda point: point[0]):
        yield figure, ranks, "ideal"
        for row in (*ROWS, *VARIANTS):
            wanted = (row in ROWS and figure != "half") or (figure, ranks, row) in RATIOS
            # simulated allreduces on 512 or more ranks take long, and the paper's Figure 10 omits
            # them
            slow = figure == "fig10" and ranks > 64 and row.startswith(("eager", "Allreduce"))
            if (wanted and not slow) or row == "WAGMA":
                yield figure, ranks, row


def make(figure: str, ranks: int, row: str) -> float:
    """Return the seconds of a step."""
    setting = SETTINGS[figure]
    if row == "ideal":
        return ideal_seconds(setting, ranks, steps=steps_of("adpsgd", ranks))
    scheme = {**ROWS, **VARIANTS}[row]
    return step_seconds(setting, scheme, ranks, steps=steps_of(scheme.name, ranks))


def keep(path: Path, name: str, seconds: float) -> None:
    """Add a run to the file, to which other processes may write at the same time."""
    done = load(path) | {name: seconds}
    partial_file = path.with_suffix(f".{os.getpid()}")
    partial_file.write_text(json.dumps(dict(sorted(done.items())), indent=1) + "\n")
    partial_file.replace(path)


def load(path: Path) -> dict[str, float]:
    """Return the seconds per step of finished runs."""
    done: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return done


def rate(done: dict[str, float], figure: str, ranks: int, row: str) -> float | None:
    """Return the steps per second, or None if the run is missing."""
    seconds = done.get(f"{figure}/{ranks}/{row}")
    return seconds and 1 / seconds


def table(done: dict[str, float], figure: str) -> str:
    """Return a figure's steps per second, with WAGMA's relative throughput in brackets."""
    ranks = SETTINGS[figure].ranks
    lines = ["| | " + " | ".join(f"P = {p}" for p in ranks) + " |", "|---|" + "---|" * len(ranks)]
    for row in ("ideal", *ROWS):
        cells = []
        for p in ranks:
            own, wagma = (rate(done, figure, p, name) for name in (row, "WAGMA"))
            ratio = (
                f" ({wagma / own:.2f})" if own and wagma and row not in ("ideal", "WAGMA") else ""
            )
            cells.append(f"{own:.4g}{ratio}" if own else "")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def targets(done: dict[str, float]) -> str:
    """Return WAGMA's throughput relative to other schemes, next to the paper's figures."""
    lines = ["| | ranks | WAGMA over | here | paper | reached |", "|---|---|---|---|---|---|"]
    for (figure, ranks, row), paper in RATIOS.items():
        own, wagma = (rate(done, figure, ranks, name) for name in (row, "WAGMA"))
        if own and wagma:
            ratio = wagma / own
            name = f"*{row}*" if row in VARIANTS else row
            reached = "yes" if round(ratio, 2) >= paper else "**no**"
            lines.append(f"| {figure} | {ranks} | {name} | {ratio:.2f} | {paper:.2f} | {reached} |")
    return "\n".join(lines)


def paid(done: dict[str, float]) -> str:
    """Return the time that delays add to a step of Figure 4 at 64 ranks."""
    added = {
        row: 1e3 * (done[f"fig4/64/{row}"] - done[f"control/64/{row}"])
        for row in ROWS
        if {f"fig4/64/{row}", f"control/64/{row}"} <= done.keys()
    }
    heads, cells = " | ".join(added), " | ".join(f"{ms:.0f}" for ms in added.values())
    return f"| {heads} |\n|" + "---|" * len(added) + f"\n| {cells} |"


def picture(done: dict[str, float], figure: str, path: Path) -> None:
    """Plot throughput over ranks, relative to the ideal throughput."""
    from matplotlib.figure import Figure

    setting, drawing = SETTINGS[figure], Figure(figsize=(8.0, 4.2), layout="constrained")
    axes, curves = drawing.subplots(), {}
    for row in STYLES:
        found = {p: rate(done, figure, p, row) for p in setting.ranks}
        curves[row] = {p: r / (rate(done, figure, p, "ideal") or r) for p, r in found.items() if r}
    as_they_end = sorted(curves, key=lambda row: -([0.0, *curves[row].values()][-1]))
    for row in filter(curves.get, as_they_end):
        ranks, values = zip(*curves[row].items(), strict=True)
        style = STYLES[row]
        look: dict[str, Any] = {
            "linewidth": 2.5 if row == "WAGMA" else 1.2,
            "zorder": 3 if ":" in style else 2,
        }
        axes.plot(ranks, values, style, label=row, markersize=5, **look)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.annotate("ideal", (setting.ranks[0], 1), (12, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set(title=setting.title, xlabel="ranks P", ylabel="throughput, over the ideal")
    axes.set(xticks=setting.ranks, xticklabels=setting.ranks, ylim=(None, 1.05))
    axes.grid(axis="y", color="0.9")
    drawing.legend(loc="outside right center", fontsize=8, frameon=False)
    drawing.savefig(path, dpi=150)


def report(done: dict[str, float], path: Path) -> None:
    """Write the pictures and the tables."""
    sections = []
    for figure in ("fig4", "control", "fig7", "fig10"):
        sections.append(f"## {SETTINGS[figure].title}\n\n")
        if len(SETTINGS[figure].ranks) > 1:
            image = path.with_name(f"averaging-{figure}.png")
            picture(done, figure, image)
            sections.append(f"![throughput over the number of ranks]({image.name})\n\n")
        sections.append(table(done, figure) + "\n\n")
    last = {row: done.get(f"fig10/1024/{row}", nan) for row in ROWS}
    local = last["local SGD, H = 1"]
    text = TEXT.format(
        targets=targets(done), paid=paid(done), sections="".join(sections).rstrip(),
        gossip=local / last["D-PSGD"], pushed=local / last["SGP, 4 neighbours"], window=8 * last["WAGMA"],
        compute=COMPUTE, beta=1e9 * BETA, alpha=1e6 * ALPHA, size=SIZE, fig7=TRANSFORMER_COMPUTE,
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Make the missing runs, then write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help='a part of a run\'s name, as "fig10/1024/WAGMA"')
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("averaging-throughput.md")
    )
    arguments = parser.parse_args()
    path = arguments.out.with_suffix(".json")
    names = {"/".join(map(str, case)): case for case in cases()}
    for name in track([name for name in names if arguments.only in name], "simulating"):
        if name not in load(path):
            keep(path, name, make(*names[name]))
    report(load(path), arguments.out)


if __name__ == "__main__":
    main()
