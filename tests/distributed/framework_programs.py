"""Scenarios of Accelerate, Lightning and the HF Trainer; importable, because processes are spawned.

Each trains straight through, saves on the way, resumes in objects made anew, and compares bits.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsync.errors import SparsyncError

from .small_model import flat

DENSITY = 0.1
os.environ["HF_HUB_OFFLINE"] = "1"


def as_launched() -> None:
    """Say to the frameworks what a launcher says; the group is there already."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def data() -> torch.utils.data.TensorDataset:
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x[:, :5].sin())


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))


def files(folder: Path) -> list[str]:
    """Wait for all ranks, then list what is there."""
    dist.barrier()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def refused(action: Any) -> str:
    try:
        action()
    except SparsyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def warned(action: Any) -> tuple[Any, bool]:
    """Return the result and whether there was a warning that residuals start at zero."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    return result, any("residuals start at zero" in str(w.message) for w in caught)


BOTH_RANKS = ["sparsync-rank-0-of-2.pt", "sparsync-rank-1-of-2.pt"]


# ---- Accelerate -------------------------------------------------------------------------------------


def accelerate_run(steps: range, save: Path | None = None, load: Path | None = None) -> Any:
    """Train steps of one fixed order of batches; save in the middle; return the weights."""
    from accelerate import Accelerator

    from sparsync.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    sync = attach(accelerator, net, density=DENSITY, timeout=30)
    if load:
        accelerator.load_state(load)
    batches = list(loader)
    for step in steps:
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        accelerator.backward((net(x) - y).pow(2).mean())
        optimizer.step()
        if save and step == 3:
            accelerator.save_state(save)
    sync.close()
    return flat(net)


def with_accelerate(directory: str) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from sparsync.integrations.accelerate import attach

    as_launched()
    folder, result = Path(directory) / "accelerate", {}
    older = folder / "sparsync" / "sparsync-rank-0-of-3.pt"  # of an older run in the same folder
    older.parent.mkdir(parents=True, exist_ok=True)
    older.touch()
    dist.barrier()
    through = accelerate_run(range(8), save=folder)
    result["every rank's file, no others"] = files(folder / "sparsync") == BOTH_RANKS
    again = accelerate_run(range(4, 8), load=folder)
    result["resume is exact"] = torch.equal(through, again)
    for file in (folder / "sparsync").iterdir() if dist.get_rank() == 0 else ():
        file.unlink()
    said = refused(lambda: accelerate_run(range(4, 8), load=folder))
    result["an empty folder is refused"] = "CheckpointError" in said
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "sparsync").rmdir()
    dist.barrier()
    fresh, said = warned(lambda: accelerate_run(range(4, 8), load=folder))
    result["without the state: warned"] = said
    result["without the state: another end"] = not torch.equal(through, fresh)

    accelerator = Accelerator(cpu=True)
    result["it is distributed"] = accelerator.distributed_type == DistributedType.MULTI_CPU
    first, second = accelerator.prepare(network(), network())
    handles = [attach(accelerator, net, density=DENSITY, timeout=30) for net in (first, second)]
    accelerator.save_state(folder / "two")
    result["two models"] = files(folder / "two" / "sparsync_1") == BOTH_RANKS
    for sync in handles:
        sync.close()
    result["unprepared"] = refused(lambda: attach(accelerator, network()))
    return result


# ---- Lightning --------------------------------------------------------------------------------------


def lightning_run(folder: Path, epochs: int, resume: Path | None = None, **checkpoints: Any) -> Any:
    """Fit; return the callback, the trainer and the weights."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from sparsync.integrations.lightning import SparsyncCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (self.net(batch[0]) - batch[1]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    callback = SparsyncCallback(density=DENSITY, timeout=30)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=epochs,
        callbacks=[callback, ModelCheckpoint(folder, "{epoch}", **checkpoints)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(data(), batch_size=8, shuffle=True)
    trainer.fit(module, loader, ckpt_path=resume)
    return callback, trainer, flat(module)


def with_lightning(directory: str) -> dict[str, Any]:
    as_launched()
    folder, result = Path(directory) / "lightning", {}
    callback, trainer, through = lightning_run(folder, 4, save_top_k=-1, save_last="link")
    result["every rank's file"] = files(folder / "epoch=1.ckpt.sparsync") == BOTH_RANKS
    result["steps"] = callback.sync.stats()["steps"] == 16
    elsewhere = Path(directory) / "elsewhere"
    *_, again = lightning_run(elsewhere, 4, folder / "epoch=1.ckpt", save_top_k=1)
    result["resume is exact"] = torch.equal(through, again)
    result["removed with its checkpoint"] = files(elsewhere) == [
        "epoch=3.ckpt",
        "epoch=3.ckpt.sparsync",
    ]
    callback, *_ = lightning_run(elsewhere, 5, folder / "last.ckpt", save_weights_only=True)
    result["a link is followed"] = callback.sync.stats()["steps"] == 20
    result["weights only: no state"] = "epoch=4.ckpt.sparsync" not in files(elsewhere)
    trainer.save_checkpoint(folder / "by-hand.ckpt")
    result["saved by hand"] = files(folder / "by-hand.ckpt.sparsync") == BOTH_RANKS
    trainer.fit_loop.max_epochs = 5
    trainer.fit(trainer.lightning_module, torch.utils.data.DataLoader(data(), batch_size=8))
    result["a second fit"] = trainer.global_step == 20
    if dist.get_rank() == 0:  # as if the job had ended between the two
        state = folder / "epoch=0.ckpt.sparsync"
        for file in state.iterdir():
            file.unlink()
        state.rmdir()
        (folder / "epoch=1.ckpt.sparsync").rename(state)
    dist.barrier()
    result["torn"] = refused(lambda: lightning_run(elsewhere, 2, folder / "epoch=0.ckpt"))
    bare = folder / "epoch=1.ckpt"
    (*_, fresh), said = warned(lambda: lightning_run(elsewhere, 4, bare, save_top_k=0))
    result["without the state: warned"] = said
    result["without the state: another end"] = not torch.equal(through, fresh)
    result["remote"] = refused(lambda: lightning_run("memory://bucket", 1))
    return result


# ---- Hugging Face -----------------------------------------------------------------------------------


class Fits(torch.nn.Module):
    """As the Trainer wants it: a dictionary with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - labels).pow(2).mean()}


def transformers_run(folder: Path, resume: Any = None, **settings: Any) -> Any:
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
    trainer = Trainer(Fits(), arguments, train_dataset=examples)
    callback = SparsyncCallback(trainer, density=DENSITY, timeout=30)
    trainer.add_callback(callback)
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
    trainer.args.max_steps = 10
    trainer.train()
    result["a second train() goes on"] = first.sync.stats()["steps"] == 18
    first.close()
    return result
