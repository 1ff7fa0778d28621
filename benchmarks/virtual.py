"""Train with all ranks in this process, and store the runs in a file; used by other scripts.

Ranks are coroutines of the simulator that take turns on one core; gradients, selections and messages are
real.  Results are the same on every machine with the same torch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.algorithm import Algorithm
from sparsync.cli.output import progress
from sparsync.cli.workloads import make_workload
from sparsync.cli.workloads.workload import Draw, Workload
from sparsync.feedback.reducer import Reducer
from sparsync.transports.sim import SimCommunicator, simulate
from sparsync.units import plan_units

LR_WARMUP_STEPS = 20  # as in ``sparsync train``
MODELS = {"digits": {}, "bytes": {"layers": 2, "width": 96}}

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
AfterStep = Callable[[Reducer, SimCommunicator], None]


def workload_of(name: str) -> Workload:
    """Make a workload: the CNN on digits, or a byte transformer with 0.28 M parameters."""
    return make_workload(name, **{"context": None, "layers": None, "width": None, **MODELS[name]})


def train(
    workload: Workload,
    algorithm: Algorithm,
    density: float,
    make_optimizer: MakeOptimizer,
    *,
    ranks: int,
    steps: int,
    batch_size: int,
    seed: int = 0,
    bar: Callable[[int], None] = lambda total: None,
    prepare: Callable[[Reducer], None] = lambda reducer: None,
    after_step: AfterStep = lambda reducer, comm: None,
    xi_period: int | None = None,
) -> dict[str, Any]:
    """Train on virtual ranks; return held-out loss, accuracy and mean bytes sent per rank.

    Args:
        workload: the model and the data.
        algorithm: the algorithm that averages gradients, with the whole model in one unit.
        density: the algorithm's density.
        make_optimizer: makes an optimizer for a rank's model.
        ranks: number of ranks P.
        steps: optimizer steps.
        batch_size: samples per rank and step.
        seed: seed of weights and data.
        bar: called with ``steps`` after every step.
        prepare: called with every rank's reducer before the first step.
        after_step: called with every rank's reducer, after its step.
        xi_period: steps between measurements of xi.
    """

    async def program(comm: SimCommunicator) -> tuple[nn.Module, int]:
        model = workload.make_model(seed)
        optimizer = make_optimizer(model)
        base = [group["lr"] for group in optimizer.param_groups]
        units = plan_units(model.named_parameters())
        reducer = Reducer(comm, units, algorithm, density, xi_period=xi_period)
        prepare(reducer)
        for step in range(steps):
            inputs, targets = workload.batch(Draw(seed, step, comm.rank, ranks, batch_size))
            optimizer.zero_grad()
            workload.loss(model(inputs), targets).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            await reducer.reduce([flat])
            put_(flat, gradients)
            for group, lr in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = lr * min(1.0, (step + 1) / LR_WARMUP_STEPS)
            optimizer.step()
            after_step(reducer, comm)
            if comm.rank == 0:
                bar(steps)
        return model, comm.ledger.total().sent

    results = simulate(program, ranks).results
    evaluation = workload.evaluate(results[0][0])
    return {
        "loss": evaluation.loss if math.isfinite(evaluation.loss) else None,
        "accuracy": evaluation.accuracy,
        "sent": fmean(sent for _, sent in results),
        "parameters": sum(p.numel() for p in results[0][0].parameters()),
    }


def put_(flat: Tensor, gradients: list[Tensor]) -> None:
    """Copy a flat vector into gradients, piece by piece."""
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view(gradient.shape))
        start += gradient.numel()


def sgd(lr: float) -> MakeOptimizer:
    """Return a factory for SGD with momentum 0.9."""
    return lambda model: torch.optim.SGD(model.parameters(), lr, momentum=0.9)


class Cache:
    """Finished runs, in a file that is rewritten after each run.

    Args:
        path: the JSON file, read on construction.
        wanted: substring of the names of the runs to make.
    """

    def __init__(self, path: Path, wanted: str = "") -> None:
        self.path, self.wanted = path, wanted
        self.done: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def find(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        """Return the run with this specification, or None."""
        return next((run for run in self.done if run["settings"] == spec), None)

    def make(self, spec: dict[str, Any], run: Callable[[Any], dict[str, Any]]) -> None:
        """Call ``run`` with a progress bar, unless the run is finished or not selected."""
        name = " ".join(map(str, spec.values()))
        if self.wanted not in name or self.find(spec):
            return
        started = time.perf_counter()
        with progress(shown=True) as rows, rows(name) as bar:
            result = run(bar)
        seconds = round(time.perf_counter() - started, 1)
        self.done.append({"settings": spec, **result, "seconds": seconds})
        partial = self.path.with_suffix(".partial")  # an interruption here loses only one run
        partial.write_text(json.dumps(self.done, indent=1) + "\n")
        partial.replace(self.path)
        print(f"{name}: loss {result['loss']}, {seconds:.0f} s", flush=True)


def spread(values: list[float], digits: int = 4) -> str:
    """Format mean and standard deviation."""
    text = f"{fmean(values):.{digits}f}"
    return text + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")
