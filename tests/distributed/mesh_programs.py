"""Scenarios of pipeline stages and tensor parallelism; importable, because processes are spawned."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

import sparsync
from tests.attaching import attach

from .small_model import flat

MICROBATCHES, ROWS = 4, 8


def mesh_of(**dims: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 12), torch.nn.Linear(12, 3)
    )


def rows(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(ROWS, 6, generator=generator)
    return x, x[:, :3].sin()


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


class Slow(torch.autograd.Function):
    """Goes backward late."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.15)
        return gradient


class Late(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(x)


class Pipe:
    """One rank of a pipeline of two stages, or of two on each rank ("v")."""

    def __init__(self, mesh: DeviceMesh, kind: str, seed: int = 0, **changes: Any) -> None:
        self.mesh, net = mesh, network(seed)
        late = changes.pop("late", False)
        halves = [net[:2], net[2:]] if kind != "v" else [net[:1], net[1:2], net[2:3], net[3:]]
        if late:
            halves[0].append(Late())
        self.place, stages = mesh["pp"].get_local_rank(), len(halves)
        mine = [i for i in range(stages) if i % 2 == self.place]
        self.module = torch.nn.ModuleList([halves[i] for i in mine])
        if changes.pop("fsdp", False):
            for half in self.module:
                fully_shard(half, mesh=mesh["shard"])
        group = mesh["pp"].get_group()
        self.stages = [
            PipelineStage(half, i, stages, torch.device("cpu"), group=group)
            for i, half in zip(mine, self.module, strict=True)
        ]
        schedules = {
            "gpipe": ScheduleGPipe,
            "1f1b": Schedule1F1B,
            "v": ScheduleInterleavedZeroBubble,
        }
        target = self.stages if kind == "v" else self.stages[0]
        scale = changes.pop("scale_grads", True)
        make: Any = schedules[kind]
        self.schedule = make(target, MICROBATCHES, loss_fn=mean_square, scale_grads=scale)
        options = {"algorithm": "oktopk", "density": 0.1, "timeout": 30, **changes}
        attached = self.module if kind == "v" else self.module[0]
        self.sync = attach(attached, replicate=mesh["dp"], schedule=self.schedule, **options)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        x, y = rows(step, self.mesh["dp"].get_local_rank())
        if self.place == 0:
            self.schedule.step(x, target=y) if len(self.stages) > 1 else self.schedule.step(x)
        else:
            self.schedule.step(target=y)

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.sync.step()
            self.optimizer.step()

    def replicas_equal(self) -> bool:
        return equal_over(self.mesh["dp"], whole(self.module))


def whole(module: torch.nn.Module) -> torch.Tensor:
    full = [getattr(p, "full_tensor", p.detach)() for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in full])


def equal_over(mesh: DeviceMesh, tensor: torch.Tensor) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(everyone, tensor.contiguous(), group=mesh.get_group())
    return all(torch.equal(theirs, tensor) for theirs in everyone)


def on_all(good: bool) -> bool:
    """Whether it is so on every rank: stages differ."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, bool(good))
    return all(answers)


def reference(steps: range, scale: float = 1.0) -> torch.nn.Sequential:
    """Train the whole network in this process, on the data of both replicas."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        for replica in range(2):
            x, y = rows(step, replica)
            (scale * mean_square(net(x), y) / 2).backward()
        optimizer.step()
    return net


def pipelines_train() -> dict[str, bool]:
    """Replicas stay equal bit for bit; at density 1 a pipeline trains what a single process does."""
    result, mesh = {}, mesh_of(dp=2, pp=2)
    everything = {"algorithm": "allgather", "density": 1.0}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "GPipe": ("gpipe", everything),
        "1F1B": ("1f1b", {**everything, "unit_bytes": 100}),
        "two stages on a rank, zero bubble": ("v", everything),
        "sums": ("1f1b", {**everything, "scale_grads": False}),
        "sparse GPipe": ("gpipe", {"unit_bytes": 100}),
        "sparse 1F1B": ("1f1b", {"algorithm": "budgeted"}),
    }
    for name, (kind, options) in settings.items():
        pipe = Pipe(mesh, kind, **options)
        pipe.train(range(5))
        result[f"{name}: replicas equal"] = on_all(pipe.replicas_equal())
        near = _near(pipe, kind, reference(range(5), MICROBATCHES if name == "sums" else 1.0))
        result[f"{name}: as one process"] = on_all(near == (options.get("density") == 1.0))
        pipe.sync.close()
    inner = Pipe(mesh_of(dp=2, shard=1, pp=2), "1f1b", fsdp=True, **everything)
    inner.train(range(5))
    result["FSDP2 in stages"] = on_all(_near(inner, "1f1b", reference(range(5))))
    inner.sync.close()
    return result


def _near(pipe: Pipe, kind: str, net: torch.nn.Sequential) -> bool:
    place = pipe.place
    mine = (net[2 * place : 2 * place + 2],) if kind != "v" else (net[place], net[place + 2])
    wanted = torch.cat([flat(part) for part in mine if len(list(part.parameters()))])
    return torch.allclose(whole(pipe.module), wanted, atol=1e-6)


def exchanges_run_in_bubbles() -> dict[str, bool]:
    """The second stage's exchange is over before the first has gone backward for the last time."""
    pipe = Pipe(mesh_of(dp=2, pp=2), "gpipe", late=True)
    pipe.train(range(2))
    ends = [0.0]
    for parameter in pipe.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ends.append(time.perf_counter()))
    pipe.train(range(2, 3))
    stats = pipe.sync.stats()
    mine = {
        "stage": pipe.place,
        "last gradient": max(ends),
        "exchanged": max(end for _, _, end in stats["exchanges_last_step"]),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    pipe.sync.close()
    backward_ends = min(told["last gradient"] for told in everyone if told["stage"] == 0)
    early = [told["exchanged"] for told in everyone if told["stage"] == 1]
    late = [told["exchanged"] for told in everyone if told["stage"] == 0]
    return {
        "in the bubble": max(early) < backward_ends - 0.1,  # of four times 0.15 s
        "the first stage's after it": min(late) > backward_ends,
    }


def a_pipeline_resumes(directory: Path) -> bool:
    mesh = mesh_of(dp=2, pp=2)
    through, first, second = (Pipe(mesh, "1f1b", threshold_period=4) for _ in range(3))
    through.train(range(7))
    first.train(range(3))
    path = directory / f"stage-{dist.get_rank()}.pt"
    torch.save({"net": first.module.state_dict(), "sync": first.sync.state_dict()}, path)
    saved = torch.load(path, weights_only=True)
    second.module.load_state_dict(saved["net"])
    second.sync.load_state_dict(saved["sync"])
    second.train(range(3, 7))
    same = torch.equal(whole(second.module), whole(through.module))
    for pipe in (through, first, second):
        pipe.sync.close()
    return on_all(same)


def a_stage_refuses_for_all() -> dict[str, bool]:
    """NaN in one gradient of one rank: no stage of any replica applies the step, residuals stay."""
    result, mesh = {}, mesh_of(dp=2, pp=2)
    for policy in ("raise", "skip"):
        pipe = Pipe(mesh, "gpipe", nonfinite=policy, unit_bytes=100)
        pipe.train(range(2))
        before = [r.accumulated.clone() for r in pipe.sync.reducer.residuals]
        weights, raised = whole(pipe.module), ""
        poison = pipe.place == 0 and mesh["dp"].get_local_rank() == 1
        hook = pipe.module[0][0].bias.register_hook(_spoiled) if poison else None
        pipe.backward(2)
        try:
            pipe.sync.step()
        except sparsync.NonFiniteGradientError as error:
            raised = str(error)
        if hook is not None:
            hook.remove()
        pipe.optimizer.step()
        wanted = policy == "raise"
        result[f"{policy}: told everywhere"] = on_all(("'0.bias'" in raised) == wanted)
        after = [r.accumulated for r in pipe.sync.reducer.residuals]
        result[f"{policy}: residuals untouched"] = on_all(all(map(torch.equal, before, after)))
        result[f"{policy}: nothing moved"] = on_all(torch.equal(whole(pipe.module), weights))
        pipe.train(range(3, 5))
        result[f"{policy}: goes on"] = on_all(pipe.replicas_equal())
        pipe.sync.close()
    return result


def _spoiled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * float("nan")


def a_forgotten_step() -> dict[str, str]:
    """What is said when ``step()`` was not called, and of a schedule that is none."""
    schedule = SimpleNamespace(_n_microbatches=2, scale_grads=True)  # torch wraps what hooks raise
    net, said = network(), {}
    options: Any = {"replicate": mesh_of(dp=2, pp=2)["dp"], "timeout": 30}
    sync = attach(net, schedule=schedule, **options)
    try:
        for step in range(3):
            mean_square(net(rows(step, 0)[0]), rows(step, 0)[1]).backward()
    except sparsync.ConfigurationError as error:
        said["forgotten"] = str(error)
    sync.close()
    try:
        attach(network(), schedule=4, **options)
    except sparsync.ConfigurationError as error:
        said["no schedule"] = str(error)
    return said


def everything_about_meshes(directory: str) -> dict[str, Any]:
    from . import tensor_programs as tensors  # which imports from here

    return {
        "pipelines": pipelines_train(),
        "bubbles": {
            **exchanges_run_in_bubbles(),
            "units overlap": tensors.units_start_while_others_go_backward(),
        },
        "resume": {"pipeline": a_pipeline_resumes(Path(directory))},
        "nonfinite": a_stage_refuses_for_all(),
        "forgotten": a_forgotten_step(),
        "a part of the world": {"trains": tensors.half_of_the_world()},
        "tensors": tensors.tensor_parallel_trains(),
        "tensors resume": tensors.tensor_parallel_resumes(Path(directory)),
        "tensors refuse": tensors.tensor_parallel_refuses(),
    }
