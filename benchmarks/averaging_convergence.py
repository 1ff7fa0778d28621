"""Compare averaging schemes on 8 ranks after equally many steps, in virtual time (WAGMA, section 5.2).

    python benchmarks/averaging_convergence.py          (two hours of a core; .md, .json, .png)
    python benchmarks/averaging_convergence.py --only digits --seeds 1

All ranks of a run are coroutines of one process, in the simulator: gradients, models and messages are
real, while computation, delays and the network take virtual time.  Late ranks, stale models and
results are therefore the same on every machine. Finished runs are stored in the .json and not
repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor

from sparsync.averaging.averager import Averager
from sparsync.averaging.binding import Binding
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.cli.output import Bar, progress
from sparsync.cli.train.settings import TrainSettings
from sparsync.cli.workloads.delays import parse_delay
from sparsync.cli.workloads.workload import Draw
from sparsync.transports.sim import Links, SimCommunicator, simulate

RANKS, STEPS = 8, 300
LOOKS = (50, 100, 150, 200, 250)  # steps after which the mean of all models is evaluated
BETWEEN = 295  # a step in the middle between two global averages, five steps from each
# name -> ranks that are late by 320 ms (section 5.2), and number of steps after which this repeats
DELAYS = {
    "two of eight late on every step": ("random:2:0.32", 1),  # as many as among 64 ranks in 5.2
    "one of eight late on every fourth": ("random:1:0.32", 4),  # 1/32 per rank and step, as in 5.2
    "one of eight late on every step": ("random:1:0.32", 1),
    "all vary by 1 %": ("uniform", 1),  # every step of every rank takes up to 1 % longer
    "nobody late": ("none", 1),
}
TRAINED = tuple(DELAYS)[:2]  # the others are simulated without a model
SMALL = 8192  # elements in runs without a model; enough to be summed like a real one
COMPUTATION = 0.621  # seconds of a step (assumed; section 5.2 states only the delay)
ALPHA = 2e-6  # seconds per message (assumed: MPI on Aries)
BETA, PARAMETERS = 0.184e-9, 25_559_081  # 5.4 GB/s (assumed); ResNet-50 (section 5.2)
LIMIT = 0.01
# all schemes use Allreduce-SGD's best rate
LRS = {"digits": (0.025, 0.05, 0.1, 0.2), "bytes": (0.1, 0.2, 0.4, 0.8)}
# 16 images per rank are 128 in total, as with the default for 4 ranks; the transformer is small, so that
# it takes an hour instead of a day
WORKLOAD_OPTIONS = {"digits": {"batch_size": 16}, "bytes": {"layers": 2, "width": 96}}
# row -> scheme and its options, in the order of the runs
ROWS = {
    "Allreduce-SGD": ("allreduce", {}),
    "WAGMA, S = 2 (default)": ("wagma", {}),
    "WAGMA, S = 4": ("wagma", {"group_size": 4}),
    "no group collectives": ("local", {"period": 10}),
    "fixed groups, S = 2": ("wagma", {"dynamic": False}),
    "fixed groups, S = 4": ("wagma", {"dynamic": False, "group_size": 4}),
    "S = P = 8": ("wagma", {"group_size": 8}),
    "Allreduce-SGD, lr x 0.7": ("allreduce", {}),
    "local SGD, H = 1": ("local", {"period": 1}),
    "D-PSGD": ("dpsgd", {}),
    "SGP, 2 neighbours": ("sgp", {"neighbours": 2}),
    "AD-PSGD": ("adpsgd", {}),
    "Eager-SGD, solo": ("eager-solo", {}),
    "Eager-SGD, majority": ("eager-majority", {}),
    "Qsparse-local-SGD, H = 8": ("qsparse-local", {}),
}
BASE, ESSENTIAL = next(iter(ROWS)), tuple(ROWS)[:8]
LR_SCALE = {"Allreduce-SGD, lr x 0.7": 0.7}  # WAGMA keeps this share of the updates
ABLATED = "WAGMA, S = 4"  # the row that the four ablations are compared with
ABLATIONS = ("no group collectives", "fixed groups, S = 4", "WAGMA, S = 2 (default)", "S = P = 8")
AVOIDING = set(ROWS) - {
    BASE, *LR_SCALE, "no group collectives", "local SGD, H = 1", "D-PSGD", "SGP, 2 neighbours",
    "Qsparse-local-SGD, H = 8",
}  # fmt: skip


WHY = """
## Differences from the paper, and known causes

- **How often ranks are late** is decisive. At the paper's rate per rank (one of eight on every fourth
  step), WAGMA is as good as Allreduce-SGD on digits. With two of eight late on every step, eight times
  that rate, its loss is higher: a stale model in an average undoes part of its members' updates, and a
  rank that has fallen behind stays stale until the next global average. In a pair in which one rank is
  always one step behind, Algorithm 2 keeps 5/7 of all updates. Allreduce-SGD with 0.7 of the learning
  rate is no better than this, so a smaller step explains the loss; other causes have not been ruled out.
- **Any jitter makes models stale.** If steps vary by 1 %, WAGMA keeps 58 to 65 % of the updates, and
  gains 3 % of throughput at most: the first rank starts the average for all, however little later the
  others are. So "nobody late" says nothing about real ranks, unless they wait for each other, as with
  `grouping="synchronous"`, which keeps all updates.
- **On bytes**, at the paper's rate, the default S = 2 is 1.2 % above Allreduce-SGD's loss and S = 4
  0.8 %, while seeds differ by more than 3 %. With S = 2 of eight, a model meets few others in ten steps.
- **The ordering of the ablations** on bytes, at the paper's rate, is the same as in the paper: among
  equal S, without groups is worst, then fixed groups, then a smaller S, and S = P is no better. On
  digits, there is no such ordering: seeds differ more than schemes do, and 300 steps of a small network
  tolerate more than 28,000 steps of ResNet-50. With two of eight late on every step, S = P and S = 4 are
  worse than smaller groups, because larger groups more often contain a stale model.
- **S = P** costs 0.2 % of throughput here, not 24 %: in the simulator, only messages cost time, and those
  of eight ranks take 33 ms; passive participation is free (`benchmarks/averaging-throughput.md`).
- Rows with one seed have no deviation, so differences between them may be due to chance.  Empty cells and
  missing rows have not been run.
"""


# ---- one run ---------------------------------------------------------------------------------------


def train(spec: dict, bar: Bar) -> dict:
    """Train one scheme on all virtual ranks; return the results."""
    settings = TrainSettings(
        ranks=RANKS,
        steps=STEPS,
        workload=spec["workload"],
        seed=spec["seed"],
        lr=spec["lr"],
        **WORKLOAD_OPTIONS[spec["workload"]],
    )
    workload, late = settings.make_workload(), lateness(spec["delay"], spec["seed"])
    sums, own = dict.fromkeys(LOOKS, 0), []

    async def program(comm: SimCommunicator) -> Tensor:
        model = workload.make_model(settings.seed)
        (optimizer,) = settings.make_optimizers(model)
        binding = bind(model, comm)
        averager = make(spec, model, comm)
        await averager.begin(comm, binding.read(), 0)
        for step in range(STEPS):
            await comm.compute(COMPUTATION + late(step, comm.rank))
            descend(settings, workload, model, optimizer, step, comm.rank)
            binding.write_(await averager.average(comm, binding.read(), step))
            if step + 1 in LOOKS:
                sums[step + 1] += binding.read()
            if step + 1 == BETWEEN:
                own.append(binding.read())
            if comm.rank == 0:
                bar(STEPS)
        return await averager.conclude(comm, binding.read(), STEPS)

    model = workload.make_model(settings.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    models = simulate(program, RANKS, links=links(size)).results

    def evaluate(vectors: list[Tensor]) -> tuple[float | None, float]:
        """Return loss and accuracy of several models, which share the held-out samples."""
        binding, shares = bind(model, None), []
        for rank, vector in enumerate(vectors):
            binding.write_(vector)
            shares.append(workload.evaluate(model, rank=rank, world_size=len(vectors)))
        whole = shares[0].total(shares)
        return whole.loss if math.isfinite(whole.loss) else None, whole.accuracy

    between = torch.stack(own).mean(0)
    loss, accuracy = evaluate(models[:1])
    return {
        "loss": loss,
        "accuracy": accuracy,
        "curve": [evaluate([total / RANKS])[0] for total in sums.values()],
        "own_loss": evaluate(own)[0],
        "between_loss": evaluate([between])[0],
        "parameters": size,
        "replicas_equal": all(torch.equal(other, models[0]) for other in models),
    }


def play(spec: dict, bar: Bar) -> dict:
    """Run a scheme without a model; return its cost, and the share of the updates that it keeps."""
    late = lateness(spec["delay"], spec["seed"])

    async def program(comm: SimCommunicator) -> tuple[Tensor, int]:
        vector, averager = torch.zeros(SMALL), make(spec, None, comm)
        await averager.begin(comm, vector, 0)
        for step in range(STEPS):
            await comm.compute(COMPUTATION + late(step, comm.rank))
            vector = await averager.average(comm, vector + 1, step)
            if comm.rank == 0:
                bar(STEPS)
        sent = comm.ledger.total().sent
        return await averager.conclude(comm, vector, STEPS), sent

    simulation = simulate(program, RANKS, links=links(SMALL))
    return {
        "kept": float(simulation.results[0][0].mean()) / STEPS,
        "virtual_seconds": simulation.seconds,
        "models_sent_per_step": max(sent for _, sent in simulation.results) / 4 / SMALL / STEPS,
    }


def make(spec: dict, model: torch.nn.Module | None, comm: SimCommunicator) -> Averager:
    """Make the averager of a row's scheme."""
    scheme, options = ROWS[spec["row"]]
    seed = {"seed": spec["seed"]} if "seed" in options_of(scheme) else {}
    return SCHEMES[scheme](model, comm=comm, **seed, **options)


def links(size: int) -> Links:
    """Return links on which ``size`` parameters take as long as ResNet-50 on the paper's links."""
    return Links(ALPHA, BETA * PARAMETERS / size)


def lateness(name: str, seed: int) -> Callable[[int, int], float]:
    """Return a rank's delay at a step, in seconds."""
    text, period = DELAYS[name]
    if text == "uniform":
        longest = 0.01 * COMPUTATION
        return lambda step, rank: longest * random.Random(f"{seed}/{step}/{rank}").random()
    delay = parse_delay(text)
    return lambda step, rank: delay.seconds(step, rank, RANKS, seed) * (step % period == 0)


def bind(model: torch.nn.Module, comm: SimCommunicator | None) -> Binding:
    """Bind a model to the vector that is averaged; the vector may contain NaN if training diverges."""
    return Binding(
        model, comm, buffers="average", optimizer=None, moments="local", nonfinite="spread"
    )


def descend(settings, workload, model, optimizer, step: int, rank: int) -> None:
    """Do one local step, as ``sparsync train`` does."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate_at(step)
    inputs, targets = workload.batch(Draw(settings.seed, step, rank, RANKS, settings.batch_size))
    optimizer.zero_grad()
    workload.loss(model(inputs), targets).backward()
    optimizer.step()


# ---- all runs --------------------------------------------------------------------------------------


class Cache:
    """Finished runs, in a file that is rewritten after each run."""

    def __init__(self, path: Path, wanted: str) -> None:
        self.path, self.wanted = path, wanted
        self.done: list[dict] = json.loads(path.read_text()) if path.exists() else []

    def find(self, spec: dict) -> dict | None:
        """Return the run with this specification, or None."""
        return next((run for run in self.done if run["settings"] == spec), None)

    def make(self, spec: dict) -> None:
        """Make the run, unless it is finished or not selected."""
        name = " ".join(map(str, spec.values()))
        if self.wanted not in name or self.find(spec):
            return
        started = time.perf_counter()
        with progress(shown=True) as rows, rows(name) as bar:
            run = train(spec, bar) if "workload" in spec else play(spec, bar)
        self.done.append({"settings": spec, **run})
        partial = self.path.with_suffix(".partial")  # an interruption here loses only one run
        partial.write_text(json.dumps(self.done, indent=1) + "\n")
        partial.replace(self.path)
        result = next(iter(run.items()))
        print(f"{name}: {result}, {time.perf_counter() - started:.0f} s", flush=True)

    def best_lr(self, workload: str) -> float:
        """Return Allreduce-SGD's best learning rate with seed 0, among finished runs."""
        tried = {
            lr: run["loss"] or math.inf
            for lr in LRS[workload]
            if (run := self.find(specify(workload, BASE, 0, lr)))
        }
        return min(tried, key=tried.__getitem__) if tried else LRS[workload][0]


def specify(workload: str, row: str, seed: int, lr: float, delay: str = TRAINED[0]) -> dict:
    """Return the settings that identify a run; without the delay if the scheme waits for all ranks."""
    if row not in AVOIDING:
        delay = TRAINED[0]
    lr = round(lr * LR_SCALE.get(row, 1), 6)
    return {"workload": workload, "row": row, "seed": seed, "lr": lr, "delay": delay}


def run_all(cache: Cache, seeds: int) -> Iterator[None]:
    """Make the missing runs, beginning with those that determine the learning rate; yield after each."""
    for delay in DELAYS:
        for row in (row for row in ROWS if row not in LR_SCALE):
            yield cache.make({"row": row, "seed": 0, "delay": delay})
    for workload in WORKLOAD_OPTIONS:
        for lr in LRS[workload]:
            yield cache.make(specify(workload, BASE, 0, lr))
    for rows in (ESSENTIAL, tuple(ROWS)):
        for seed in range(seeds):
            for workload in WORKLOAD_OPTIONS:
                for delay in TRAINED:
                    for row in rows:
                        lr = cache.best_lr(workload)
                        yield cache.make(specify(workload, row, seed, lr, delay))


# ---- what is shown ---------------------------------------------------------------------------------


def found(cache: Cache, workload: str, row: str, seeds: int, delay: str) -> dict[int, dict]:
    """Return the finished runs of a row, by seed."""
    lr = cache.best_lr(workload)
    runs = {s: cache.find(specify(workload, row, s, lr, delay)) for s in range(seeds)}
    return {seed: run for seed, run in runs.items() if run}


def played(cache: Cache, row: str, delay: str) -> dict | None:
    """Return the results of running a scheme without a model."""
    return cache.find({"row": row, "seed": 0, "delay": delay})


def play_table(cache: Cache) -> list[str]:
    """Return throughput and the kept share of updates, for all delays."""
    lines = [
        f"| scheme | models sent | {' | '.join(DELAYS)} |",
        "|---" * (2 + len(DELAYS)) + "|",
    ]
    for row in ROWS:
        cells = []
        for delay in DELAYS:
            run, base = played(cache, row, delay), played(cache, BASE, delay)
            faster = run and base and base["virtual_seconds"] / run["virtual_seconds"]
            cells.append(f"{faster:.2f}; {100 * run['kept']:.0f} %" if faster else "")
        sent = played(cache, row, next(iter(DELAYS)))
        if sent:
            cells = [f"{sent['models_sent_per_step']:.2f}", *cells]
            lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def section(cache: Cache, workload: str, seeds: int) -> list[str]:
    """Return the table of one workload."""
    tried = {lr: cache.find(specify(workload, BASE, 0, lr)) for lr in LRS[workload]}
    losses = ", ".join(f"{shown(run['loss'])} at {lr:g}" for lr, run in tried.items() if run)
    base = found(cache, workload, BASE, seeds, TRAINED[0])
    if not base:
        return []
    lines = [
        "",
        f"## {workload}: {base[0]['parameters']:,} parameters, lr {cache.best_lr(workload):g}",
        "",
        f"{BASE}, seed 0: {losses}.",
        "",
        "| scheme | late | seeds | held-out loss | over allreduce | accuracy, % | over allreduce "
        "| own models |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        for delay in TRAINED if row in AVOIDING else TRAINED[:1]:
            runs = found(cache, workload, row, seeds, delay)
            pairs = [(run, base[seed]) for seed, run in runs.items() if seed in base]
            if pairs:
                lines.append(line(row, delay if row in AVOIDING else "any", pairs))
    return lines + ablations(cache, workload, seeds)


def ablations(cache: Cache, workload: str, seeds: int) -> list[str]:
    """Return the ablations of section 5.2; each run is compared with WAGMA's run with the same seed."""
    lines = ["", f"Held-out loss over that of {ABLATED}, same seeds:", ""]
    lines += ["| late | " + " | ".join(ABLATIONS) + " |", "|---" * (1 + len(ABLATIONS)) + "|"]
    for delay in TRAINED:
        base, cells = found(cache, workload, ABLATED, seeds, delay), []
        for row in ABLATIONS:
            runs = found(cache, workload, row, seeds, delay)
            over = [
                100 * (run["loss"] / base[seed]["loss"] - 1)
                for seed, run in runs.items()
                if seed in base and run["loss"] and base[seed]["loss"]
            ]
            lost = f" ({len(runs) - len(over)} diverged)" if len(over) < len(runs) else ""
            cells.append(f"{spread(over, 1, '+')} %{lost}" if over else "diverges")
        lines.append(f"| {delay} | {' | '.join(cells)} |")
    return lines


def line(row: str, delay: str, pairs: list[tuple[dict, dict]]) -> str:
    """Return one row, in which each run is compared with Allreduce-SGD's run with the same seed."""
    runs = [run for run, _ in pairs]
    cells = [row, delay.split(" late")[0] + delay.partition(" on")[2], f"{len(runs)}"]
    if any(run["loss"] is None for run in runs):
        return f"| {' | '.join(cells)} | diverges | | | | |"
    for key, better, scale, digits in (("loss", -1, 1, 4), ("accuracy", 1, 100, 2)):
        over = [run[key] / base[key] - 1 for run, base in pairs]
        mark = "**" if better * fmean(over) >= -LIMIT and row != BASE else ""
        cells += [spread([scale * run[key] for run in runs], digits)]
        cells += [f"{mark}{spread([100 * x for x in over], 1, '+')} %{mark}"]
    own = fmean(run["own_loss"] / run["between_loss"] - 1 for run in runs)
    return f"| {' | '.join(cells)} | {own:+.1%} |"


def spread(values: list[float], digits: int, sign: str = "") -> str:
    """Format mean and standard deviation."""
    text = f"{fmean(values):{sign}.{digits}f}"
    return text + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def shown(loss: float | None) -> str:
    """Format a loss."""
    return "diverges" if loss is None else f"{loss:.4f}"


def picture(cache: Cache, seeds: int, path: Path) -> None:
    """Draw held-out loss over virtual time."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    figure = Figure(figsize=(11, 8), layout="constrained")
    styles = ("-", "-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))
    for number, (delay, workload) in enumerate(product(TRAINED, WORKLOAD_OPTIONS), start=1):
        if not played(cache, BASE, delay) or not found(cache, workload, BASE, seeds, delay):
            continue
        axis = figure.add_subplot(2, 2, number)
        for style, row in zip(styles, ESSENTIAL, strict=True):
            runs = found(cache, workload, row, seeds, delay).values()
            time_of = played(cache, BASE if row in LR_SCALE else row, delay)
            if not runs or not time_of or any(run["loss"] is None for run in runs):
                continue
            seconds = time_of["virtual_seconds"] / STEPS
            curves = zip(*([*run["curve"], run["loss"]] for run in runs), strict=True)
            axis.plot(
                [seconds * step for step in (*LOOKS, STEPS)],
                [fmean(losses) for losses in curves],
                linestyle=style,
                linewidth=2.6 if style == "-" else 1.4,
                label=row,
            )
        axis.set(title=f"{workload}: {delay}", xlabel="virtual seconds")
        axis.set_ylabel("held-out loss of the mean of all models")
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def report(cache: Cache, seeds: int, name: str) -> str:
    """Return the document."""
    tables = "\n".join(text for w in WORKLOAD_OPTIONS for text in section(cache, w, seeds))
    schemes = "\n".join(play_table(cache))
    return f"""# Averaging schemes after equal steps

`python benchmarks/averaging_convergence.py`, torch {torch.__version__}, {platform.machine()}: {RANKS}
ranks, {STEPS} steps of SGD with momentum 0.9, learning rate constant after 20 steps of warm-up:
Allreduce-SGD's best for all rows. *digits*: the CNN of `sparsync train`, 16 images per rank; *bytes*:
the byte transformer with 2 layers of width 96, 8 windows per rank. WAGMA's tau is 10.

**Time is virtual**: all ranks run in the simulator, in one process, but training is real. A step computes
for {COMPUTATION} s, or 0.32 s longer on late ranks, which are drawn anew for every step. Messages take as
long as those of ResNet-50 on links of 5.4 GB/s. In WAGMA's section 5.2, two of 64 ranks are late. Two of
eight slow Allreduce-SGD down as much, but each rank is late eight times as often; one of eight on every
fourth step gives the paper's rate per rank.

## What the schemes do

These figures are from runs without a model, with seed 0: throughput (steps per virtual second) relative
to Allreduce-SGD's, and the share of the ranks' updates in the final mean, where every update counts 1/P.
*Models sent*: per rank and step. *All vary by 1 %*: every step of every rank takes up to 1 % longer.
*Nobody late*: all ranks take the same time to the last bit, as real ranks never do.

{schemes}

![held-out loss over virtual time]({name})

The tables below show means and standard deviations over seeds. *Over allreduce* compares runs with the
same seed; **bold** means at most 1 % worse. All losses are evaluated after `finish()`. *Own models* is
the mean of the ranks' own losses, relative to the loss of their mean model, after {BETWEEN} steps, midway
between two global averages. *any*: schemes that wait for all ranks produce the same models whichever rank
is late. {tables}
{WHY}"""


def main() -> None:
    """Run the grid; write the results after every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help='a part of a run\'s name, as "digits WAGMA"')
    default = Path(__file__).with_name("averaging-convergence.md")
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)  # models are small
    cache, image = Cache(args.out.with_suffix(".json"), args.only), args.out.with_suffix(".png")
    for _ in run_all(cache, args.seeds):
        args.out.write_text(report(cache, args.seeds, image.name), encoding="utf-8")
    picture(cache, args.seeds, image)


if __name__ == "__main__":
    main()
