"""Compare thresholds reused for tau' steps with thresholds reused until the count leaves a band.

    python benchmarks/threshold_period.py                (writes threshold-period.md, .json)
    python benchmarks/threshold_period.py --only LAMB    (only runs with "LAMB" in their name)

All ranks run in one process. Finished runs are stored in the .json and not repeated.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from statistics import fmean
from unittest import mock

import torch
from virtual import Cache, train, workload_of

from sparsync.feedback.reducer import Reducer
from sparsync.monitoring import Monitor, Sink
from sparsync.published.oktopk import oktopk
from sparsync.published.oktopk import reuse as reused
from sparsync.selection.selector import largest
from sparsync.sparse import SparseVector

RANKS, STEPS, DENSITY, BATCH = 2, 256, 0.01, 8
PERIODS = (32, 64, 128, "auto")
LIMIT = 0.11  # Ok-Topk, section 5.1


class Lars(torch.optim.Optimizer):
    """``v = m v + lr (trust |w| / (|g| + decay |w|)) (g + decay w); w = w - v`` per layer.

    References: You et al., Large Batch Training of Convolutional Networks, 2017, Algorithm 1.
    """

    def __init__(self, parameters, lr: float, trust: float = 0.02, decay: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "trust": trust, "decay": decay, "momentum": 0.9})

    @torch.no_grad()
    def step(self) -> None:
        """Apply one update."""
        for group in self.param_groups:
            for w in group["params"]:
                norm, decay = float(w.norm()), group["decay"]
                local = group["trust"] * norm / (float(w.grad.norm()) + decay * norm + 1e-12)
                velocity = self.state[w].setdefault("velocity", torch.zeros_like(w))
                velocity.mul_(group["momentum"])
                velocity.add_(w.grad + decay * w, alpha=group["lr"] * (local if norm else 1.0))
                w.sub_(velocity)


class Lamb(torch.optim.Optimizer):
    """``u = m / (sqrt(v) + eps) + decay w; w = w - lr (|w| / |u|) u`` per layer, m and v unbiased.

    References: You et al., Large Batch Optimization for Deep Learning, ICLR 2020, Algorithm 2.
    """

    def __init__(self, parameters, lr: float, decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        """Apply one update."""
        for group in self.param_groups:
            for w in group["params"]:
                state, (b1, b2) = self.state[w], group["betas"]
                m, v = (state.setdefault(name, torch.zeros_like(w)) for name in "mv")
                state["t"] = t = state.get("t", 0) + 1
                m.lerp_(w.grad, 1 - b1)
                v.lerp_(w.grad.square(), 1 - b2)
                update = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-6) + group["decay"] * w
                norms = float(w.norm()), float(update.norm())
                w.sub_(update, alpha=group["lr"] * (norms[0] / norms[1] if all(norms) else 1.0))


OPTIMIZERS = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), 1e-3),
    "LARS": lambda model: Lars(model.parameters(), 0.1),
    "LAMB": lambda model: Lamb(model.parameters(), 5e-3),
}


def run(spec: dict, bar) -> dict:
    """Train with a selector; count its exact steps, and measure how far its counts are from k."""
    deviations: list[list[float]] = []
    exact: list[int] = []
    renewed: list[int] = []
    states: dict[int, object] = {}

    def prepare(reducer: Reducer) -> None:
        k, size = reducer.plan.quotas[0], reducer.units[0].size
        mine: list[float] = []
        deviations.append(mine)
        sink = Sink(lambda step, v: mine.append(abs(v["density_local"] * size / k - 1)))
        reducer.monitor = Monitor(reducer.comm, reducer.units, sink)

    def after_step(reducer: Reducer, comm) -> None:
        reducer.monitor.write()
        state = reducer.selectors[0].state
        if states.get(comm.rank) is not state:
            renewed.append(reducer.step)
        states[comm.rank] = state

    def counted(accumulated: torch.Tensor, k: int) -> SparseVector:
        exact.append(k)
        return largest(accumulated, k)

    with mock.patch.object(reused, "largest", counted):
        result = train(
            workload_of(spec["workload"]),
            oktopk(threshold_period=spec["period"], cap=None, floor=None),
            DENSITY,
            OPTIMIZERS[spec["optimizer"]],
            ranks=RANKS,
            steps=STEPS,
            batch_size=BATCH,
            bar=bar,
            prepare=prepare,
            after_step=after_step,
        )
    later = [value for mine in deviations for value in mine[STEPS // 2 :]]
    everywhere = [value for mine in deviations for value in mine]
    return {
        **result,
        "exact": len(exact) / RANKS,
        "renewed": len(renewed) / RANKS,
        "mean": fmean(everywhere),
        "mean_later": fmean(later),
        "largest": max(everywhere),
    }


def specify(workload: str, optimizer: str, period) -> dict:
    """Return the settings that identify a run."""
    return {"workload": workload, "optimizer": optimizer, "period": period}


def report(cache: Cache) -> str:
    """Return the document."""
    lines = [
        "| model | optimizer | tau' | steps over all n | thresholds renewed | mean deviation "
        "| of the second half | largest | held-out loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for workload in ("bytes", "digits"):
        for optimizer in OPTIMIZERS:
            for period in PERIODS:
                one = cache.find(specify(workload, optimizer, period))
                if one:
                    mark = "**" if one["mean"] < LIMIT else ""
                    lines.append(
                        f"| {workload} | {optimizer} | {period} | {one['exact']:g} "
                        f"| {one['renewed']:g} | {mark}{one['mean']:.1%}{mark} "
                        f"| {one['mean_later']:.1%} | {one['largest']:.0%} | {one['loss']:.4f} |"
                    )
    table = "\n".join(lines)
    return f"""# How long a threshold remains useful

`python benchmarks/threshold_period.py`, torch {torch.__version__}, {platform.machine()}: {RANKS} ranks,
{STEPS} steps, density {DENSITY:g}, batch {BATCH} per rank, Ok-Topk with reused local thresholds and
neither cap nor floor, so every entry that reaches the threshold is selected. *Deviation*: difference
between the number of selected entries and k, mean over steps and ranks; **bold** if below the paper's
{LIMIT:.0%}. *Steps over all n* select among all n elements, which is the expensive case; "auto" usually
renews its threshold from the entries that it collects near the old one, at almost no cost. A threshold
that selects several times k also sends several times as much, so the losses of those rows are not
comparable. LARS and LAMB were implemented from their papers.

{table}
"""


def main() -> None:
    """Run the grid; write the results after every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of a run's name")
    default = Path(__file__).with_name("threshold-period.md")
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)  # models are small
    cache = Cache(args.out.with_suffix(".json"), args.only)
    for workload in ("digits", "bytes"):
        for optimizer in OPTIMIZERS:
            for period in PERIODS:
                spec = specify(workload, optimizer, period)
                cache.make(spec, lambda bar, spec=spec: run(spec, bar))
                args.out.write_text(report(cache), encoding="utf-8")


if __name__ == "__main__":
    main()
