"""Split the time of a RedSync step into the phases of Figure 10.

    python benchmarks/redsync_phases.py     (2 minutes; writes benchmarks/redsync_phases.md and .png)

``sparsync_papers.reproduce.redsync_phases`` simulates the step: select, mask, pack, communicate,
unpack.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sparsync.published.redsync.cost_model import SelectionTimes
from sparsync_papers.reproduce.redsync_phases import (
    CLEAR,
    DENSITY,
    MASK,
    MOMENTUM_MASK,
    PACK,
    QUANTISED_RGC,
    RGC,
    SCHEMES,
    SHRINK,
    STAGES,
    Machine,
    lstm,
    phases,
    resnet50,
)

RANKS = (2, 4, 8, 16, 32, 64, 128)
Measured = dict[str, dict[int, dict[str, float]]]  # seconds by scheme, ranks and stage


def table(measured: Measured) -> str:
    """Return the milliseconds per stage, and the share of unpacking."""
    lines = [f"| | P | {' | '.join(STAGES)} | together | unpack |", "|---|" + "---:|" * 8]
    for scheme, rows in measured.items():
        for ranks, row in list(rows.items())[::2]:
            whole = sum(row.values())
            cells = " | ".join(f"{1e3 * row[stage]:.2f}" for stage in STAGES)
            share = 100 * row["unpack"] / whole
            lines.append(f"| {scheme} | {ranks} | {cells} | {1e3 * whole:.1f} | {share:.0f} % |")
    return "\n".join(lines)


SHADES = ("#bdbdbd", "#969696", "#636363", "#4c9be8", "#d95f02")  # one for each stage
WIDTH_INCHES, HEIGHT_INCHES = 10.0, 5.6


def picture(measured: dict[str, Measured], path: Path) -> None:
    """Plot the published schemes' stage shares over P, and all schemes' seconds at the last P."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots(len(measured), 2, squeeze=False, width_ratios=(1.3, 1))
    for (shares, seconds), (model, schemes) in zip(axes, measured.items(), strict=True):
        for shift, scheme in ((-0.2, RGC), (0.2, QUANTISED_RGC)):
            for at, row in enumerate(schemes[scheme.name].values()):
                start = 0.0
                for stage, shade in zip(STAGES, SHADES, strict=True):
                    share = 100 * row[stage] / sum(row.values())
                    shares.bar(at + shift, share, 0.36, start, color=shade)
                    start += share
        shares.set(title=f"{model}: left RGC, right quantised", ylabel="share of the step, %")
        shares.set(xlabel="ranks P", ylim=(0, 100), xticks=range(len(RANKS)), xticklabels=RANKS)
        for name, rows in reversed(schemes.items()):
            start = 0.0
            for stage, shade in zip(STAGES, SHADES, strict=True):
                width = 1e3 * rows[RANKS[-1]][stage]
                seconds.barh(name, width, 0.6, start, color=shade, label=stage)
                start += width
            seconds.text(start, name, f" {start:.0f}", va="center", fontsize=8)
        seconds.set(title=f"{model}: at P = {RANKS[-1]}", xlabel="milliseconds per step")
        seconds.margins(x=0.1)
    bars = axes[0][1].containers[: len(STAGES)]
    figure.legend(bars[::-1], STAGES[::-1], fontsize=8, loc="outside right")
    figure.savefig(path, dpi=150)


def report(measured: dict[str, Measured]) -> str:
    """Return the document."""
    last = {model: [rows[RANKS[-1]] for rows in m.values()] for model, m in measured.items()}
    resnet, language = last.values()
    share = [f"{100 * row['unpack'] / sum(row.values()):.0f} %" for row in resnet]
    one, two = ([f"{1e3 * sum(row.values()):.0f}" for row in rows] for rows in (resnet, language))
    machine, times = Machine(), SelectionTimes()
    select = (times.trimmed, times.search, times.searched)
    started = ", ".join(f"{1e6 * t.overhead:.0f}" for t in select)
    passes = ", ".join(f"{t.per_byte / machine.memory:.0f}" for t in select)
    tables = "\n\n".join(f"## {model}\n\n{table(rows)}" for model, rows in measured.items())
    return f"""# RedSync: where a step's time goes

`python benchmarks/redsync_phases.py`; RedSync's Figure 10 in the simulator's virtual time, density
{100 * DENSITY:g} %, milliseconds per step. The results are the same on every machine.

![shares of the stages over P, and milliseconds at P = {RANKS[-1]}](redsync_phases.png)

At P = {RANKS[-1]} unpacking takes {share[0]} of a step of ResNet-50, {share[1]} if quantised; the paper
measured 69 and 67 %. Unpacking adds P messages to every layer one by one, and each kernel has a fixed
cost, however little it adds. The LSTM has few layers, all of them large. There, the bytes of P messages
dominate, and quantised messages, which need a search on every step, pay off beyond 16 ranks, as in the
paper. `budgeted` applies O(k) entries and avoids both costs: {one[3]} ms against {one[0]}, and for the
LSTM {two[3]} against {two[0]}. One kernel per message, for all layers at once, solves the problem of
unpacking in the allgather ({one[2]} and {two[2]} ms) but not its bytes.

The collectives, their messages and bytes, and the size policy are real (dense below 128 KB, trimmed,
search with reuse from 4 MB; quantised: search on every step, with a plain output layer). The network and
the GPU are modelled on a node of Piz Daint; a pass reads or writes the bytes of a layer once:

| constant, per layer | value | from |
|---|---|---|
| bandwidth | {1e-9 / machine.beta:g} GB/s | section 6.1, Figure 5 |
| latency | {1e6 * machine.alpha:g} us per message | ours: MPI on Aries |
| a kernel | {1e6 * machine.launch:g} us | ours: started from Python |
| memory | {1e-9 / machine.memory:.0f} GB/s | ours: 3/4 of a P100's 732 GB/s |
| select: trimmed, search, reuse | {started} us; {passes} passes | Algorithms 2, 3 |
| mask: with momentum, without | {MOMENTUM_MASK}; {MASK} | Algorithm 4 |
| pack | {PACK} | Algorithm 4 |
| unpack | {CLEAR}; and a kernel per message | Algorithm 4 |
| unpack, a message | {machine.scattered:g} passes | ours: 4 bytes touch 2 x 32 |

Nothing overlaps, and all layers travel in one message, whereas the paper sends several, which flatters
the allgather. Layers are {SHRINK} times smaller than real, and bandwidths {SHRINK} times lower. This
preserves all times except those of headers (up to 7 % of quantised messages) and of `budgeted`'s
slack, which are too long.

{tables}
"""


def main() -> None:
    """Simulate, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    measured = {
        model.name: {
            scheme.name: {ranks: phases(model, scheme, ranks) for ranks in RANKS}
            for scheme in SCHEMES
        }
        for model in (resnet50(), lstm())
    }
    picture(measured, arguments.out.with_suffix(".png"))
    arguments.out.write_text(report(measured), encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
