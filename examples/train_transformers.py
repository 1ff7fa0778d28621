"""Hugging Face Trainer with sparse synchronisation: one callback.

    torchrun --nproc-per-node 2 examples/train_transformers.py --folder run
    torchrun --nproc-per-node 2 examples/train_transformers.py --folder run --resume

The first run saves halfway; the second continues from there and ends with the same weights,
bit for bit.  A tiny GPT-2, built here, learns the bytes of this file: nothing is downloaded.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from sparsync.integrations.transformers import SparsyncCallback

CONTEXT = 32  # bytes in a window


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model with the HF Trainer.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps in total")
    parser.add_argument("--density", type=float, default=0.02, help="of the gradient, in (0, 1]")
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    return parser.parse_args()


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of this file; the Trainer shifts the labels itself."""

    def __init__(self) -> None:
        text = torch.tensor(list(Path(__file__).read_bytes()))
        self.windows = text.unfold(0, CONTEXT, 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def make_model() -> nn.Module:
    """Build a GPT-2 of 0.1 M parameters with random weights."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=1, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def digest(model: nn.Module) -> str:
    """Return a fingerprint that any changed bit of the weights changes."""
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train and print a summary."""
    options = arguments()
    set_seed(0)
    settings = TrainingArguments(
        output_dir=str(options.folder),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=options.steps,
        per_device_train_batch_size=8,
        optim="sgd",  # why not Adam: docs/optimizers.md
        learning_rate=0.5,
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=options.steps // 2,
        logging_steps=max(options.steps // 4, 1),
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(make_model(), settings, train_dataset=Windows())
    sparse = SparsyncCallback(trainer, density=options.density)
    trainer.add_callback(sparse)  # the only new line
    start = options.folder / f"checkpoint-{options.steps // 2}"
    trainer.train(resume_from_checkpoint=str(start) if options.resume else None)
    if trainer.is_world_process_zero():
        assert sparse.sync is not None
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        sent = sparse.sync.stats()["bytes_sent_per_step_max"]
        print(
            f"{settings.world_size} ranks, {trainer.state.global_step} steps: "
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
            f"at most {sent:,} bytes sent per step, weights {digest(trainer.model)}"
        )
    sparse.close()


if __name__ == "__main__":
    main()
