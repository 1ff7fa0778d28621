"""Accelerate, Lightning, the Hugging Face Trainer and the examples run on two ranks over gloo.

Each of them trains without a break, saves along the way, resumes in new objects, and must give
equal bits.
"""

import importlib
import os
import re
import shutil
import sys
import warnings
from subprocess import PIPE

import pytest
import torch
import torch.distributed as dist

import sparsync
from sparsync.errors import CheckpointError
from tests.on_ranks import on_ranks, refused, same_everywhere

from .commands import ROOT, end, start, torchrun
from .small_model import flat

EXAMPLES = ROOT / "examples"
UPDATES = {"transport": sparsync.Transport(timeout=30)}
SETTINGS = {**UPDATES, "density": 0.1}
BOTH_RANKS = ["sparsync-rank-0-of-2.pt", "sparsync-rank-1-of-2.pt"]
TORN = ["was saved with other weights", "from another checkpoint"]


def launched():
    """Set the variables that a launcher would set; the process group already exists."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    os.environ |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "HF_HUB_OFFLINE": "1"}


def data():
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x[:, :5].sin())


def batches(**options):
    return torch.utils.data.DataLoader(data(), batch_size=8, **options)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))


def loss_of(net, x, y):
    return (net(x) - y).pow(2).mean()


def files(folder):
    """Wait for all ranks, then list the folder."""
    dist.barrier()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def on_rank_0(function, *arguments):
    """Let one rank change files, between two barriers."""
    dist.barrier()
    if dist.get_rank() == 0:
        function(*arguments)
    dist.barrier()


def replace(folder, older):
    """Put the states of another checkpoint into a folder, as if a job had ended between writing both."""
    shutil.rmtree(folder)
    shutil.copytree(older, folder)


def warned(action):
    """Return the result, after checking for the warning that residuals start at zero."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    assert any("residuals start at zero" in str(w.message) for w in caught)
    return result


def overflowing(net):
    """Let the second batch of one rank overflow, as in half precision."""
    seen = []

    def inputs(module, args):
        seen.append(args)
        return args[0] / 0 if len(seen) == 2 and dist.get_rank() == 1 else args[0]

    net.register_forward_pre_hook(inputs)
    return net


def scaled():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def followed(sync, scaler):
    """Return whether all ranks skipped that step, and the residual adopted the scale after it."""
    return sync.reducer.skipped == 1 and sync.reducer.scale == scaler.get_scale() == 2.0**9


# ---- Accelerate -----------------------------------------------------------------------------------


def accelerate_run(steps, save=None, load=None, adam=False):
    """Train on batches in a fixed order; save in the middle; return the weights.

    With AdamW, whose updates are exchanged, steps accumulate two batches, clip, and follow a
    schedule.
    """
    from accelerate import Accelerator

    from sparsync.frameworks.accelerate import attach

    accelerator, net = Accelerator(cpu=True, gradient_accumulation_steps=1 + adam), network()
    optimizer = (
        torch.optim.AdamW(net.parameters(), lr=0.01)
        if adam
        else torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, batches(), schedule)
    sync = attach(accelerator, net, **(UPDATES if adam else SETTINGS))
    if load:
        accelerator.load_state(load)
    loaded = list(loader)
    for step in steps:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, *loaded[step % len(loaded)]))
            if adam and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if adam:
                schedule.step()
            optimizer.zero_grad()
        if save and step == 3:
            accelerator.save_state(save)
    stats = sync.stats()
    assert stats["exchange"] == ("updates" if adam else "gradients")
    if adam:
        assert stats["local_steps"] == (steps.stop // 2)
        # the first steps exchange all weights, and the first one also asks whether ranks report
        # their amounts of data
        last = stats["bytes_sent_last_exchange"]
        assert stats["bytes_sent_per_local_step"] == pytest.approx(last, rel=0.1)
    sync.close()
    return flat(net)


@on_ranks(2)
def test_accelerate_brings_every_rank_its_own_weights_and_moments(folder):
    launched()
    through = accelerate_run(range(12), save=folder, adam=True)
    assert not same_everywhere(through)
    assert torch.equal(through, accelerate_run(range(4, 12), load=folder, adam=True))


@on_ranks(2)
def test_accelerate_resumes_exactly(folder):
    launched()
    states = folder / "sparsync"
    # of an older run in the same folder
    on_rank_0(states.mkdir)
    on_rank_0((states / "sparsync-rank-0-of-3.pt").touch)
    through = accelerate_run(range(8), save=folder)
    assert files(states) == BOTH_RANKS
    assert torch.equal(through, accelerate_run(range(4, 8), load=folder))
    other = folder / "other"
    accelerate_run(range(2, 8), save=other)
    on_rank_0(replace, other / "sparsync", states)
    with refused(*TORN):
        accelerate_run(range(4, 8), load=other)
    on_rank_0(lambda: [file.unlink() for file in states.iterdir()])
    with refused(error=CheckpointError):
        accelerate_run(range(4, 8), load=folder)
    on_rank_0(states.rmdir)
    assert not torch.equal(through, warned(lambda: accelerate_run(range(4, 8), load=folder)))


@on_ranks(2)
def test_accelerate_has_several_models_and_is_restored(folder):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from sparsync.frameworks.accelerate import attach

    launched()
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    with refused("Sequential is none of", "accelerator.prepare"):
        attach(accelerator, network())
    models = accelerator.prepare(network(), network())
    handles = [attach(accelerator, net, **SETTINGS) for net in models]
    accelerator.save_state(folder)
    assert files(folder / "sparsync_1") == BOTH_RANKS
    wrapped = accelerator.load_state
    for sync in handles:
        assert accelerator.load_state is wrapped
        sync.close()
    assert "load_state" not in vars(accelerator)
    assert not accelerator._save_model_state_pre_hook
    assert not accelerator._load_model_state_pre_hook


@on_ranks(2)
def test_accelerate_skips_an_overflow():
    """With the scaler that mixed_precision="fp16" makes on a GPU."""
    from accelerate import Accelerator

    from sparsync.frameworks.accelerate import attach

    launched()
    accelerator, net = Accelerator(cpu=True), overflowing(network())
    accelerator.scaler = scaled()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    sync = attach(accelerator, net, **SETTINGS)
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward(loss_of(net, *data().tensors))
        optimizer.step()
    sync.close()
    assert followed(sync, accelerator.scaler)


# ---- Lightning ------------------------------------------------------------------------------------


def lightning_trainer(epochs, callbacks, **options):
    import lightning

    defaults = {"strategy": "ddp", "logger": False, "enable_progress_bar": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=callbacks,
        enable_model_summary=False,
        **{**defaults, **options},
    )


def lightning_run(folder, epochs, resume=None, plugins=None, adam=False, others=(), **checkpoints):
    """Fit, with ``others`` as further callbacks; return the callback, the trainer and the weights."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from sparsync.frameworks.lightning import SparsyncCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = overflowing(network()) if plugins else network()

        def training_step(self, batch, batch_idx):
            return loss_of(self.net, *batch)

        def validation_step(self, batch, batch_idx):
            assert same_everywhere(flat(self.net))

        def configure_optimizers(self):
            if adam:
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    callback, module = SparsyncCallback(**(UPDATES if adam else SETTINGS)), Module()
    saving = ModelCheckpoint(folder, "{epoch}", **checkpoints)
    trainer = lightning_trainer(epochs, [callback, *others, saving], plugins=plugins)
    trainer.fit(module, batches(shuffle=True), batches() if adam else None, ckpt_path=resume)
    return callback, trainer, flat(module)


@pytest.mark.slow
@on_ranks(2)
def test_lightning_resumes_exactly(folder):
    launched()
    elsewhere = folder / "elsewhere"
    callback, trainer, through = lightning_run(folder, 4, save_top_k=-1, save_last="link")
    assert files(folder / "epoch=1.ckpt.sparsync") == BOTH_RANKS
    assert callback.sync.stats()["exchanges"] == 16
    *_, again = lightning_run(elsewhere, 4, folder / "epoch=1.ckpt", save_top_k=1)
    assert torch.equal(through, again)
    # earlier states are removed with their checkpoints
    assert files(elsewhere) == ["epoch=3.ckpt", "epoch=3.ckpt.sparsync"]
    linked, *_ = lightning_run(elsewhere, 5, folder / "last.ckpt", save_weights_only=True)
    assert linked.sync.stats()["exchanges"] == 20
    assert "epoch=4.ckpt.sparsync" not in files(elsewhere)
    trainer.save_checkpoint(folder / "by-hand.ckpt")
    assert files(folder / "by-hand.ckpt.sparsync") == BOTH_RANKS
    wrapped = trainer.strategy.save_checkpoint
    trainer.fit_loop.max_epochs = 5
    trainer.fit(trainer.lightning_module, batches())
    assert trainer.global_step == callback.sync.stats()["exchanges"] == 20
    assert trainer.strategy.save_checkpoint is wrapped
    callback.close()
    assert "save_checkpoint" not in vars(trainer.strategy)
    on_rank_0(replace, folder / "epoch=0.ckpt.sparsync", folder / "epoch=1.ckpt.sparsync")
    with refused(*TORN):
        lightning_run(elsewhere, 2, folder / "epoch=0.ckpt")
    on_rank_0(shutil.rmtree, folder / "epoch=1.ckpt.sparsync")
    bare = folder / "epoch=1.ckpt"
    *_, fresh = warned(lambda: lightning_run(elsewhere, 4, bare, save_top_k=0))
    assert not torch.equal(through, fresh)


@pytest.mark.slow
@on_ranks(2)
def test_lightning_brings_every_rank_its_own_weights_and_moments(folder):
    launched()
    callback, trainer, through = lightning_run(folder, 4, adam=True, save_top_k=-1)
    assert callback.sync.stats()["exchange"] == "updates" and same_everywhere(through)
    *_, again = lightning_run(folder / "elsewhere", 4, folder / "epoch=1.ckpt", adam=True)
    assert torch.equal(through, again)
    trainer.fit_loop.max_epochs = 6  # a second fit continues, with the module's new optimizer
    trainer.fit(trainer.lightning_module, batches())
    module = trainer.lightning_module
    assert callback.sync.stats()["local_steps"] == 8 and same_everywhere(flat(module))
    assert trainer.optimizers[0].state[module.net[0].bias]["step"] == 8
    assert not torch.equal(flat(module), through)


@pytest.mark.slow
@on_ranks(2)
def test_lightning_ends_equal_where_a_later_callback_writes_weights(folder):
    """As those do that average weights; what is in the model at the end is rank 0's."""
    import lightning

    class Writes(lightning.Callback):
        def on_train_end(self, trainer, module):
            for parameter in module.parameters():
                torch.nn.init.constant_(parameter, dist.get_rank())

    launched()
    *_, weights = lightning_run(folder, 1, adam=True, others=[Writes()], save_top_k=0)
    assert not weights.any() and same_everywhere(weights)


@pytest.mark.slow
@on_ranks(2)
def test_lightning_saves_own_weights_during_validation(folder):
    import lightning

    own, validated = [], []

    class Saves(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            own.append(flat(module))

        def on_validation_epoch_end(self, trainer, module):
            if not trainer.sanity_checking:
                validated.append(flat(module))
                trainer.save_checkpoint(folder / f"epoch={trainer.current_epoch}.ckpt")
                assert torch.equal(flat(module), validated[-1]) and same_everywhere(validated[-1])

    launched()
    *_, through = lightning_run(folder / "own", 2, adam=True, others=[Saves()], save_top_k=0)
    saved = torch.load(folder / "epoch=0.ckpt", weights_only=True)["state_dict"]
    saved = torch.cat([value.flatten() for value in saved.values()])
    assert torch.equal(saved, own[3]) == (dist.get_rank() == 0)
    assert not torch.equal(saved, validated[0])
    *_, again = lightning_run(folder / "again", 2, folder / "epoch=0.ckpt", adam=True, save_top_k=0)
    assert torch.equal(through, again)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("adam", [True, False])
def test_lightning_fits_again_after_an_exception(folder, adam):
    import lightning

    class Breaks(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2 and trainer.fit_loop.max_epochs == 1:
                self.module = module
                raise KeyError("enough")

    launched()
    breaks = Breaks()
    with pytest.raises(KeyError, match="enough"):
        lightning_run(folder, 1, adam=adam, others=[breaks], save_top_k=0)
    trainer, module = breaks.module.trainer, breaks.module
    callback = trainer.callbacks[0]
    first, trainer.fit_loop.max_epochs = callback.sync, 2
    assert not first.closed and first.stats()["local_steps"] == 2
    trainer.fit(module, batches())
    assert first.closed and trainer.global_step == callback.sync.steps + 2 * adam
    assert same_everywhere(flat(module))


@pytest.mark.slow
@on_ranks(2)
def test_lightning_skips_an_overflow_and_refuses_remote_folders(folder):
    from lightning.pytorch.plugins.precision import MixedPrecision

    launched()
    half = MixedPrecision("16-mixed", "cpu", scaler=scaled())
    callback, *_ = lightning_run(folder, 1, plugins=[half], save_top_k=0)
    assert followed(callback.sync, half.scaler)
    with refused("memory://bucket", "dirpath"):
        lightning_run("memory://bucket", 1)


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_lightning_with_two_optimizers(folder, kind):
    """Train two networks against each other, each with its own optimizer."""
    import lightning

    from sparsync.frameworks.lightning import SparsyncCallback

    class Pair(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = network(), torch.nn.Linear(5, 1)

        def training_step(self, batch, batch_idx):
            for at, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                made = self.first(batch[0])
                verdict = self.second(made.detach() if at else made)
                self.manual_backward(verdict.square().mean() + at * self.second(batch[1]).mean())
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            make = getattr(torch.optim, kind)
            return [make(net.parameters(), lr=0.01) for net in self.children()]

    launched()
    callback = SparsyncCallback(**(SETTINGS if kind == "SGD" else UPDATES))
    module, before = Pair(), flat(Pair())
    trainer = lightning_trainer(
        2,
        [callback],
        strategy="ddp_find_unused_parameters_true",
        default_root_dir=folder,
        enable_checkpointing=False,
    )
    trainer.fit(module, batches())
    steps = callback.sync.stats()["local_steps"]
    # one of 4 x 2 batches per backward pass; or both
    assert steps == (2 * 8 if kind == "SGD" else 8)
    assert same_everywhere(flat(module)) and not torch.equal(flat(module), before)


# ---- the Hugging Face Trainer ---------------------------------------------------------------------


class Fits(torch.nn.Module):
    """Return a dictionary with the loss, as the Trainer expects."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels):
        assert self.training or same_everywhere(flat(self))
        return {"loss": loss_of(self.net, x, labels)}


SGD_ARGUMENTS = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}


def transformers_run(folder, resume=None, scaler=None, evaluate_first=False, **settings):
    """Train 8 steps; return the callback, the trainer and the weights."""
    from transformers import Trainer, TrainingArguments

    from sparsync.frameworks.transformers import SparsyncCallback

    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        save_strategy="steps",
        report_to="none",
        disable_tqdm=True,
        **{
            **SGD_ARGUMENTS,
            **{"use_cpu": True, "ddp_backend": "gloo", "max_steps": 8, "save_steps": 3},
            **settings,
        },
    )
    examples, model = [{"x": x, "labels": y} for x, y in data()], Fits()
    if scaler is not None:
        overflowing(model.net)
    trainer = Trainer(model, arguments, train_dataset=examples, eval_dataset=examples)
    sgd = settings.get("optim", "sgd") == "sgd"
    callback = SparsyncCallback(trainer, **(SETTINGS if sgd else UPDATES))
    trainer.add_callback(callback)
    trainer.accelerator.scaler = scaler  # as fp16=True sets it on a GPU
    if evaluate_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    return callback, trainer, flat(trainer.model)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the Trainer sees all processes on GPUs")
@on_ranks(2)
def test_transformers_that_overlooks_the_other_ranks_is_refused(folder):
    """Without ``use_cpu``, Accelerate takes no CPU for a part of a group: ranks would train alike."""
    from accelerate.state import AcceleratorState

    launched()
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with refused("2 processes were started, but Accelerate sees 1", "use_cpu=True"):
            transformers_run(folder, use_cpu=False, ddp_backend=None)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@on_ranks(2)
def test_transformers_that_is_not_wrapped_has_no_dense_run(folder):
    """On a CPU, Accelerate 1.15 does not wrap a model that it has prepared for an evaluation."""
    launched()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSYNC_DISABLE", "1")
        with refused("SPARSYNC_DISABLE=1", "not wrapped", "train() before trainer.evaluate()"):
            transformers_run(folder, evaluate_first=True)
        callback, *_ = transformers_run(folder, max_steps=1)
        assert callback.sync.stats()["exchange"] == "none"
        callback.close()


@pytest.mark.slow
@on_ranks(2)
def test_transformers_resumes_exactly(folder):
    launched()
    elsewhere, early, late = (folder / name for name in ("other", "checkpoint-3", "checkpoint-6"))
    first, trainer, through = transformers_run(folder)
    assert files(early / "sparsync") == BOTH_RANKS
    callback, _, again = transformers_run(elsewhere, str(early), save_total_limit=1)
    assert torch.equal(through, again)
    assert files(elsewhere) == ["checkpoint-8"]
    callback.close()
    callback, *_ = transformers_run(elsewhere, True, max_steps=12, save_only_model=True)
    assert callback.sync.stats()["exchanges"] == 12
    assert files(elsewhere / "checkpoint-12" / "sparsync") == []
    callback.close()
    on_rank_0((early / "sparsync").rename, folder / "away")
    callback, _, fresh = warned(lambda: transformers_run(elsewhere, str(early)))
    assert not torch.equal(through, fresh)
    callback.close()
    on_rank_0((folder / "away").rename, early / "sparsync")
    on_rank_0(replace, late / "sparsync", early / "sparsync")
    with refused(*TORN):
        transformers_run(elsewhere, str(late))
    trainer.args.max_steps = 10
    trainer.train()
    assert first.sync.stats()["exchanges"] == 18
    with refused("close() that one"):
        type(first)(trainer)
    first.close()
    assert "train" not in vars(trainer)


@pytest.mark.slow
@on_ranks(2)
def test_transformers_brings_every_rank_its_own_weights_and_moments(folder):
    launched()
    adam = {"optim": "adamw_torch", "learning_rate": 0.01, "lr_scheduler_type": "cosine"}
    adam |= {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    first, trainer, through = transformers_run(folder, **adam)
    assert first.sync.stats()["exchange"] == "updates" and same_everywhere(through)
    assert first.sync.stats()["local_steps"] == 8
    callback, _, again = transformers_run(folder / "other", str(folder / "checkpoint-3"), **adam)
    callback.close()
    assert torch.equal(through, again)
    trainer.args.max_steps = 12
    trainer.train()  # continues with the same optimizer
    assert first.sync.stats()["local_steps"] == 20 and same_everywhere(flat(trainer.model))
    first.close()
    assert not {"train", "evaluation_loop"} & vars(trainer).keys()


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}
BEST |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the first evaluation's


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("kind", ["sgd", "adamw_torch"])
def test_transformers_ends_equal_with_and_without_a_best_model(folder, kind):
    from safetensors.torch import load_file

    launched()
    # each rank has its own disk: rank 1 finds no checkpoint, as on another machine
    settings, own = {**BEST, "optim": kind, "learning_rate": 0.03}, folder / str(dist.get_rank())
    callback, trainer, ended = transformers_run(own / "early", eval_delay=99, **settings)
    assert trainer.state.best_model_checkpoint is None and same_everywhere(ended)
    callback.close()
    callback, trainer, ended = transformers_run(own, max_steps=12, **settings)
    best = load_file(folder / "0" / "checkpoint-4" / "model.safetensors")
    assert same_everywhere(ended) and all(
        torch.equal(value, best[name]) for name, value in trainer.model.state_dict().items()
    )
    callback.close()


@pytest.mark.slow
@on_ranks(2)
def test_transformers_trains_on_from_its_best_model(folder):
    """The best model is not a local step from the last one, however near it is."""
    launched()
    settings = {**BEST, "optim": "adamw_torch", "learning_rate": 0.03, "max_steps": 40}
    callback, trainer, best = transformers_run(folder, **settings)
    first = callback.sync
    assert first.closed and first.stats()["local_steps"] == 40
    began = []
    trainer.model.register_forward_pre_hook(lambda module, _: began.append(flat(module)))
    trainer.train()
    assert torch.equal(began[0], best)
    assert callback.sync is not first and callback.sync.stats()["local_steps"] == 40
    assert same_everywhere(flat(trainer.model)) and not torch.equal(flat(trainer.model), best)
    callback.close()


@pytest.mark.slow
@on_ranks(2)
def test_transformers_skips_an_overflow(folder):
    launched()
    scaler = scaled()
    callback, *_ = transformers_run(folder, scaler=scaler)
    assert followed(callback.sync, scaler)
    callback.close()


# ---- examples and imports -------------------------------------------------------------------------


def example(name, ranks, *options):
    """Run an example; return its last line."""
    process = start(*torchrun(ranks), EXAMPLES / f"train_{name}.py", *options, stderr=PIPE)
    out, err = end(process, 240)
    assert process.returncode == 0, err[-3000:]
    lines = [line for line in err.splitlines() if not line.startswith("sparsync: ")]
    assert "sparsync" not in "".join(lines), err  # no warning of ours
    said = out.splitlines()[-1]
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", said).groups())
    return said, after / before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "accelerate", "lightning", "transformers"])
def test_the_example_is_short_learns_and_resumes_in_new_processes(name, tmp_path):
    assert len((EXAMPLES / f"train_{name}.py").read_text().splitlines()) <= 60
    through, ratio = example(name, 2, tmp_path)
    again, _ = example(name, 2, tmp_path, "--resume")
    assert ratio < 0.6, through
    ends = r"-> (\d\.\d{6}), \d\.\d{3} bytes"
    assert re.search(ends, through)[1] == re.search(ends, again)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("fsdp", [], "2 replicas x 2 shards"),
        ("fsdp", ["--ddp"], "2 replicas x 2 shards"),
        ("pipeline", ["--schedule", "1f1b"], "2 replicas x 2 stages"),
        ("tensor_parallel", [], "2 replicas x 2 tensor-parallel ranks"),
    ],
)
def test_the_example_of_a_divided_model_learns(name, options, shape):
    said, ratio = example(name, 4, "--steps", "25", "--timeout", "60", *options)
    assert ratio < 0.8, said
    assert said.startswith(f"{shape}, 25 steps") and said.endswith("replicas equal: True"), said


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_framework_is_named(name, monkeypatch):
    module = f"sparsync.frameworks.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for loaded in (name, *(m for m in sys.modules if m.startswith(f"{name}."))):
        monkeypatch.setitem(sys.modules, loaded, None)
    with refused(f"{module} needs {name}", f"pip install {name}"):
        importlib.import_module(module)
