"""Scenarios of Accelerate and Lightning; importable, because processes are spawned.

Each trains straight through, saves on the way, resumes in objects made anew, and compares bits.
"""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sparsync
from sparsync.errors import SparsyncError

from .small_model import flat, same_everywhere

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


def torn(folder: Path, older: Path) -> None:
    """Put another checkpoint's states into a folder, as a job leaves it that ends between two writes."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        shutil.copytree(older, folder)
    dist.barrier()


def overflowing(net: torch.nn.Module) -> torch.nn.Module:
    """Let the second batch of one rank overflow, as in half precision."""
    batches = []

    def inputs(module: Any, args: Any) -> Any:
        batches.append(args)
        return args[0] / 0 if len(batches) == 2 and dist.get_rank() == 1 else args[0]

    net.register_forward_pre_hook(inputs)
    return net


def followed(sync: Any, scaler: torch.amp.GradScaler) -> bool:
    """Tell whether all ranks skipped that step, and the residual has the scale of after it."""
    return sync.reducer.skipped == 1 and sync.reducer.scale == scaler.get_scale() == 2.0**9


def scaled() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


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
    sync = attach(accelerator, net, density=DENSITY, transport=sparsync.Transport(timeout=30))
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
    other = folder.with_name("other")
    accelerate_run(range(2, 8), save=other)
    torn(other / "sparsync", folder / "sparsync")
    result["torn"] = refused(lambda: accelerate_run(range(4, 8), load=other))
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
    handles = [
        attach(accelerator, net, density=DENSITY, transport=sparsync.Transport(timeout=30))
        for net in (first, second)
    ]
    accelerator.save_state(folder / "two")
    result["two models"] = files(folder / "two" / "sparsync_1") == BOTH_RANKS
    attached = accelerator.load_state
    for sync in handles:
        result["one wrapper for two models"] = accelerator.load_state is attached
        sync.close()
    result["close() restores"] = not (
        "load_state" in vars(accelerator)
        or accelerator._save_model_state_pre_hook
        or accelerator._load_model_state_pre_hook
    )
    result["unprepared"] = refused(lambda: attach(accelerator, network()))
    result["an overflow is skipped"] = accelerate_scaler()
    return result


def accelerate_scaler() -> bool:
    """Train with the scaler that mixed_precision="fp16" makes on a GPU."""
    from accelerate import Accelerator

    from sparsync.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaled()
    net = overflowing(network())
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    sync = attach(accelerator, net, density=DENSITY, transport=sparsync.Transport(timeout=30))
    x, y = data().tensors
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward((net(x) - y).pow(2).mean())
        optimizer.step()
    sync.close()
    return followed(sync, accelerator.scaler)


# ---- Lightning --------------------------------------------------------------------------------------


def lightning_run(
    folder: Path, epochs: int, resume: Path | None = None, plugins: Any = None, **checkpoints: Any
) -> Any:
    """Fit; return the callback, the trainer and the weights."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from sparsync.integrations.lightning import SparsyncCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = overflowing(network()) if plugins else network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return (self.net(batch[0]) - batch[1]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    callback = SparsyncCallback(density=DENSITY, transport=sparsync.Transport(timeout=30))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=epochs,
        callbacks=[callback, ModelCheckpoint(folder, "{epoch}", **checkpoints)],
        logger=False,
        plugins=plugins,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(data(), batch_size=8, shuffle=True)
    trainer.fit(module, loader, ckpt_path=resume)
    return callback, trainer, flat(module)


def with_lightning(directory: str) -> dict[str, Any]:
    from lightning.pytorch.plugins.precision import MixedPrecision

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
    linked, *_ = lightning_run(elsewhere, 5, folder / "last.ckpt", save_weights_only=True)
    result["a link is followed"] = linked.sync.stats()["steps"] == 20
    result["weights only: no state"] = "epoch=4.ckpt.sparsync" not in files(elsewhere)
    trainer.save_checkpoint(folder / "by-hand.ckpt")
    result["saved by hand"] = files(folder / "by-hand.ckpt.sparsync") == BOTH_RANKS
    attached = trainer.strategy.save_checkpoint
    trainer.fit_loop.max_epochs = 5
    trainer.fit(trainer.lightning_module, torch.utils.data.DataLoader(data(), batch_size=8))
    result["a second fit"] = trainer.global_step == callback.sync.stats()["steps"] == 20
    result["wrapped once"] = trainer.strategy.save_checkpoint is attached
    callback.close()
    result["close() restores"] = "save_checkpoint" not in vars(trainer.strategy)
    torn(folder / "epoch=0.ckpt.sparsync", folder / "epoch=1.ckpt.sparsync")
    result["torn"] = refused(lambda: lightning_run(elsewhere, 2, folder / "epoch=0.ckpt"))
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "epoch=1.ckpt.sparsync")
    dist.barrier()
    bare = folder / "epoch=1.ckpt"
    (*_, fresh), said = warned(lambda: lightning_run(elsewhere, 4, bare, save_top_k=0))
    result["without the state: warned"] = said
    result["without the state: another end"] = not torch.equal(through, fresh)
    result["remote"] = refused(lambda: lightning_run("memory://bucket", 1))
    half = MixedPrecision("16-mixed", "cpu", scaler=scaled())
    callback, *_ = lightning_run(elsewhere, 1, plugins=[half], save_top_k=0)
    result["an overflow is skipped"] = followed(callback.sync, half.scaler)
    return result


def with_two_optimizers(directory: str) -> dict[str, Any]:
    """Train two networks against each other, each with its own optimizer."""
    import lightning

    from sparsync.integrations.lightning import SparsyncCallback

    class Pair(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = network(), torch.nn.Linear(5, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for at, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                made = self.first(batch[0])
                verdict = self.second(made.detach() if at else made)
                self.manual_backward(verdict.square().mean() + at * self.second(batch[1]).mean())
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.children()]

    as_launched()
    callback = SparsyncCallback(density=DENSITY, transport=sparsync.Transport(timeout=30))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp_find_unused_parameters_true",
        devices=2,
        max_epochs=2,
        callbacks=[callback],
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, before = Pair(), flat(Pair())
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=8))
    return {
        "a step per backward pass": callback.sync.stats()["steps"] == 2 * 8,
        "replicas are equal": same_everywhere(flat(module)),
        "it trained": not torch.equal(flat(module), before),
    }
