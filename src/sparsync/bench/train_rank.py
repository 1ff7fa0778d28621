"""What every rank of ``sparsync train`` runs: one training per algorithm, and its measurement."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.bench.report import TrainResult
from sparsync.bench.train_settings import TrainSettings
from sparsync.errors import PeerError, SparsyncError
from sparsync.integrations.ddp import DdpSync, attach
from sparsync.workloads.byte_transformer import ByteTransformer
from sparsync.workloads.text import ByteText

__all__ = ["BeforeStep", "dense_bytes_per_step", "train_rank"]

BeforeStep = Callable[[int, int], None]


def dense_bytes_per_step(parameters: int, world_size: int, itemsize: int = 4) -> int:
    """Return what a rank sends in a bandwidth-optimal allreduce: ``2 n (P - 1) / P`` elements.

    Example:
        >>> dense_bytes_per_step(parameters=1000, world_size=4)
        6000
    """
    return -(-2 * parameters * itemsize * (world_size - 1) // world_size)


def train_rank(
    settings: TrainSettings, algorithms: Sequence[str], before_step: BeforeStep | None = None
) -> list[TrainResult]:
    """Train once per algorithm, on the same data from the same initial weights; all ranks call it.

    Args:
        settings: equal for all of them.
        algorithms: names of presets.  "dense" is plain DDP without any hook of ours, so what it
            sends is not counted: it is the closed form of an allreduce, ``dense_bytes_per_step``.
        before_step: called with (rank, step).

    Returns:
        One result per algorithm, the same on all ranks.

    Raises:
        PeerError: another rank is gone; names this rank and the step.
    """
    text = ByteText.of_standard_library()
    results = []
    with _progress() as progress:
        for name in algorithms:
            task = progress.add_task(name, total=settings.steps, loss=math.nan)

            def after_step(loss: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, loss=loss)

            results.append(_train(settings, name, text, before_step, after_step))
    return results


def _progress() -> Progress:
    """Make the progress bar: on rank 0's standard error, if that is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=dist.get_rank() != 0 or not console.is_terminal,
    )


def _train(
    settings: TrainSettings,
    name: str,
    text: ByteText,
    before_step: BeforeStep | None,
    after_step: Callable[[float], None],
) -> TrainResult:
    rank = dist.get_rank()
    model = ByteTransformer(context=text.context, seed=settings.seed)
    ddp = DistributedDataParallel(model)
    sync = None if name == "dense" else _attach(ddp, name, settings)
    optimizer = settings.make_optimizer(model)
    mine = _RankReport()
    for step in range(settings.steps):
        if before_step is not None:
            before_step(rank, step)
        started = time.perf_counter()
        with _naming_gloo(f"rank {rank}, step {step}"):
            loss = _step(settings, ddp, optimizer, text, step)
        mine.seconds.append(time.perf_counter() - started)
        mine.loss.append(loss)
        mine.sent.append(_bytes_sent(model, sync))
        after_step(loss)
    if sync is not None:
        sync.close()
    with _naming_gloo(f"rank {rank}, evaluation"):
        mine.evaluate_(model, text)
        everyone = mine.gather()
    return _result(settings, name, model, everyone)


def _attach(ddp: DistributedDataParallel, name: str, settings: TrainSettings) -> DdpSync:
    return attach(
        ddp,
        name,
        density=settings.density,
        warmup_steps=settings.warmup_steps,
        timeout=settings.timeout,
    )


def _bytes_sent(model: nn.Module, sync: DdpSync | None) -> int:
    """Return what this rank sent in the step that has just ended."""
    if sync is not None:
        return sync.reducer.comm.ledger.last_step.sent
    return dense_bytes_per_step(_count(model), dist.get_world_size())


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _step(
    settings: TrainSettings,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    text: ByteText,
    step: int,
) -> float:
    """Do one step; return this rank's loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate_at(step)
    tokens, targets = text.batch(
        seed=settings.seed, step=step, rank=dist.get_rank(), batch_size=settings.batch_size
    )
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp(tokens).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


@contextmanager
def _naming_gloo(where: str) -> Iterator[None]:
    """Turn what gloo says inside plain DDP into an error that names rank and step."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SparsyncError) or "gloo" not in str(error):
            raise
        first_line = str(error).splitlines()[0].split(". This is ")[0]
        raise PeerError(
            f"{where}: a collective of torch.distributed failed; another rank is gone, or did not "
            f"answer within --timeout ({first_line})"
        ) from error


@dataclass
class _RankReport:
    """What one rank measured; gathered once, at the end.

    Attributes:
        loss: per step, of this rank's batch.
        seconds: per step.
        sent: bytes, per step.
        eval_loss_sum: summed over the bytes that this rank evaluated.
        eval_bytes: how many these are.
        digest: of the parameters after the last step.
    """

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    eval_loss_sum: float = 0.0
    eval_bytes: int = 0
    digest: str = ""

    @torch.no_grad()
    def evaluate_(
        self, model: nn.Module, text: ByteText, *, windows: int = 1024, batch_size: int = 32
    ) -> None:
        """Evaluate this rank's share of the held-out windows; fingerprint the parameters."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        tokens, targets = (part[rank::world_size] for part in text.evaluation(windows))
        for start in range(0, len(tokens), batch_size):
            part = slice(start, start + batch_size)
            logits = model(tokens[part]).flatten(0, 1)
            loss = F.cross_entropy(logits, targets[part].flatten(), reduction="sum")
            self.eval_loss_sum += loss.item()
        self.eval_bytes = targets.numel()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().contiguous().numpy().tobytes())
        self.digest = digest.hexdigest()

    def gather(self) -> list[_RankReport]:
        """Return all ranks' reports, on all ranks."""
        everyone: list[_RankReport] = [self] * dist.get_world_size()
        dist.all_gather_object(everyone, self)
        return everyone


def _result(
    settings: TrainSettings, name: str, model: ByteTransformer, everyone: Sequence[_RankReport]
) -> TrainResult:
    step_seconds = [max(times) for times in zip(*(r.seconds for r in everyone), strict=True)]
    sent = [max(nbytes) for nbytes in zip(*(r.sent for r in everyone), strict=True)]
    return TrainResult(
        algorithm=name,
        ranks=len(everyone),
        steps=settings.steps,
        density=1.0 if name == "dense" else settings.density,
        parameters=_count(model),
        optimizer=settings.optimizer,
        lr=settings.learning_rate,
        loss=[fmean(losses) for losses in zip(*(r.loss for r in everyone), strict=True)],
        eval_loss=sum(r.eval_loss_sum for r in everyone) / sum(r.eval_bytes for r in everyone),
        seconds_total=max(sum(r.seconds) for r in everyone),
        seconds_per_step_median=median(step_seconds),
        bytes_sent_per_step_max=max(sent),
        replicas_equal=len({r.digest for r in everyone}) == 1,
        bytes_sent=sent,
        seed=settings.seed,
        batch_size=settings.batch_size,
        context=model.context,
        warmup_steps=0 if name == "dense" else settings.warmup_steps,
    )
