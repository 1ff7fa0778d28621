"""Scenarios of the Hugging Face Trainer; importable, because processes are spawned."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sparsync

from .framework_programs import (
    BOTH_RANKS,
    DENSITY,
    as_launched,
    data,
    files,
    followed,
    network,
    overflowing,
    refused,
    scaled,
    torn,
    warned,
)
from .small_model import flat


class Fits(torch.nn.Module):
    """As the Trainer wants it: a dictionary with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).pow(2).mean()}


def transformers_run(folder: Path, resume: Any = None, scaler: Any = None, **settings: Any) -> Any:
    """Train 8 steps; return the callback, the trainer and the weights."""
    from transformers import Trainer, TrainingArguments

    from sparsync.integrations.transformers import SparsyncCallback

    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=8,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        save_strategy="steps",
        report_to="none",
        disable_tqdm=True,
        **{"max_steps": 8, "save_steps": 3, **settings},
    )
    examples = [{"x": x, "labels": y} for x, y in data()]
    model = Fits()
    if scaler is not None:
        overflowing(model.net)
    trainer = Trainer(model, arguments, train_dataset=examples)
    callback = SparsyncCallback(trainer, density=DENSITY, transport=sparsync.Transport(timeout=30))
    trainer.add_callback(callback)
    trainer.accelerator.scaler = scaler  # as fp16=True sets it on a GPU
    trainer.train(resume_from_checkpoint=resume)
    return callback, trainer, flat(trainer.model)


def with_transformers(directory: str) -> dict[str, Any]:
    as_launched()
    folder, result = Path(directory) / "transformers", {}
    first, trainer, through = transformers_run(folder)
    result["every rank's file"] = files(folder / "checkpoint-3" / "sparsync") == BOTH_RANKS
    elsewhere = Path(directory) / "other"
    callback, _, again = transformers_run(
        elsewhere, str(folder / "checkpoint-3"), save_total_limit=1
    )
    result["resume is exact"] = torch.equal(through, again)
    result["only the last is kept"] = files(elsewhere) == ["checkpoint-8"]
    callback.close()
    callback, *_ = transformers_run(elsewhere, True, max_steps=12, save_only_model=True)
    result["resume from the last one"] = callback.sync.stats()["steps"] == 12
    result["model only: no state"] = files(elsewhere / "checkpoint-12" / "sparsync") == []
    callback.close()
    if dist.get_rank() == 0:
        (folder / "checkpoint-3" / "sparsync").rename(folder / "away")
    dist.barrier()
    (callback, _, fresh), said = warned(
        lambda: transformers_run(elsewhere, str(folder / "checkpoint-3"))
    )
    result["without the state: warned"] = said
    result["without the state: another end"] = not torch.equal(through, fresh)
    callback.close()
    if dist.get_rank() == 0:
        (folder / "away").rename(folder / "checkpoint-3" / "sparsync")
    torn(folder / "checkpoint-6" / "sparsync", folder / "checkpoint-3" / "sparsync")
    late = str(folder / "checkpoint-6")
    result["torn"] = refused(lambda: transformers_run(elsewhere, late))
    scaler = scaled()
    callback, *_ = transformers_run(elsewhere, scaler=scaler)
    result["an overflow is skipped"] = followed(callback.sync, scaler)
    callback.close()
    trainer.args.max_steps = 10
    trainer.train()
    result["a second train() goes on"] = first.sync.stats()["steps"] == 18
    result["a second callback is refused"] = "close() that one" in refused(
        lambda: type(first)(trainer)
    )
    first.close()
    result["close() restores"] = "train" not in vars(trainer)
    return result
