"""Compare averaging schemes for PPO by return and time; ranks collect for unequal times.

    python benchmarks/ppo.py     (writes benchmarks/ppo.md, .json)
    python benchmarks/ppo.py --ranks 2 --runs 1 --iterations 5 --algorithm allreduce,local

CartPole replaces the Habitat navigation of WAGMA's section 5.4, which is not available (see
``sparsync_papers.workloads.ppo``).  A step of CartPole takes microseconds, a rendered step
milliseconds; ``--step-seconds`` adds a sleep of this length to each step, so that a waiting rank
does not free a core for the others. Every row is written once it is done, so a run can be
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import torch
import torch.distributed as dist

from sparsync.averaging.schemes import SCHEMES
from sparsync.cli.launch import launch
from sparsync.cli.output import progress
from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.ppo import Ppo

# 8 is WAGMA's synchronisation period in section 5.4; the other values are choices made here
OPTIONS = {"wagma": {"sync_period": 8}, "local": {"period": 1}}


def train(algorithm: str, seed: int, args: argparse.Namespace) -> dict:
    """Train on all ranks; return their combined measurements."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = Ppo(environment=args.environment, episodes=args.episodes)
    model = task.make_model(seed)
    optimizer = torch.optim.Adam(model.parameters(), task.lr)
    scheme, options, steps = SCHEMES[algorithm], OPTIONS.get(algorithm, {}), []
    with (
        progress(shown=rank == 0) as rows,
        rows(f"{algorithm}, run {seed}") as bar,
        scheme(model, **options) as averager,
    ):
        dist.barrier()
        started = time.perf_counter()
        for iteration in range(args.iterations):
            place = {"seed": seed, "iteration": iteration, "rank": rank}
            experience = task.collect(model, **place)
            time.sleep(experience.steps * args.step_seconds)
            task.update_(model, optimizer, experience, **place)
            averager.step()
            steps.append(experience.steps)
            bar(args.iterations)
        averager.finish()
        seconds = time.perf_counter() - started
    last = replace(task, episodes=args.final_episodes)
    final = last.collect(model, seed=seed, iteration=args.iterations, rank=rank)
    weights = [parameter.tolist() for parameter in model.parameters()]
    everyone: list = [None] * ranks
    dist.all_gather_object(everyone, (seconds, steps, final.returns, weights))
    all_seconds, all_steps, all_returns, all_weights = zip(*everyone, strict=True)
    return {
        "algorithm": algorithm,
        "seed": seed,
        "return": fmean(value for values in all_returns for value in values),
        "seconds": max(all_seconds),
        "ms_per_step": 1e3 * max(all_seconds) / fmean(map(sum, all_steps)),
        "imbalance": fmean(max(now) / fmean(now) for now in zip(*all_steps, strict=True)),
        "replicas_equal": all(theirs == weights for theirs in all_weights),
    }


def table(rows: list[dict], args: argparse.Namespace) -> str:
    """Return the runs as Markdown."""
    lines = [
        f"# PPO on {args.environment}, {args.ranks} ranks",
        "",
        f"`python benchmarks/ppo.py --ranks {args.ranks} --runs {args.runs} --iterations "
        f"{args.iterations} --episodes {args.episodes} --step-seconds {args.step_seconds:g}` on "
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}. Mean and standard "
        f"deviation over runs. Every rank collects {args.episodes} whole episodes per iteration, learns "
        f"from them, and averages its model; {args.iterations} iterations. *Return*: of "
        f"{args.final_episodes} new episodes per rank with the model after `finish()`; in CartPole, an "
        "episode's return is its length, at most 500 steps. *Time*: of the slowest rank, including "
        "`finish()`. Episodes of a better policy take longer, so *per step* divides this time by the "
        "mean number of steps that a rank collects. *Ratio*: time per step relative to the first row's "
        "with the same seed, run immediately before or after, because the machine was also doing other "
        "work. *Imbalance*: steps of the rank that collects most in an iteration, relative to the "
        "mean. Habitat, the paper's task, is out of reach.",
        "",
        "| algorithm | runs | return | time, s | per step, ms | ratio | imbalance | replicas equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = {
        row["seed"]: row["ms_per_step"] for row in rows if row["algorithm"] == rows[0]["algorithm"]
    }
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        runs = [row for row in rows if row["algorithm"] == algorithm]
        keys = ("return", "seconds", "ms_per_step", "imbalance")
        cells = [_spread([run[key] for run in runs]) for key in keys]
        cells.insert(3, _spread([run["ms_per_step"] / first[run["seed"]] for run in runs]))
        equal = "yes" if all(run["replicas_equal"] for run in runs) else "NO"
        lines.append(f"| {algorithm} | {len(runs)} | {' | '.join(cells)} | {equal} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def main() -> None:
    """Train every scheme once per seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", default="wagma,allreduce,local", help=", ".join(SCHEMES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--episodes", type=int, default=4, help="per rank and iteration")
    parser.add_argument("--final-episodes", type=int, default=10, help="per rank, to evaluate")
    parser.add_argument("--environment", default="CartPole-v1")
    parser.add_argument("--step-seconds", type=float, default=5e-4, help="sleep per step")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()
    algorithms = args.algorithm.split(",")
    if unknown := set(algorithms) - set(SCHEMES):
        parser.error(f"unknown algorithm {', '.join(unknown)}; choose of {', '.join(SCHEMES)}")
    try:
        Ppo(args.environment, args.episodes).make_environment()
    except ConfigurationError as error:
        parser.error(str(error))
    rows = []
    for seed in range(args.runs):
        for algorithm in algorithms:
            rows.append(launch(train, args.ranks, algorithm, seed, args))
            args.output.write_text(table(rows, args))
            args.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
