"""Accelerate with sparse synchronisation: call ``attach`` after ``prepare``; the rest is unchanged.

    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py --folder run
    torchrun --nproc-per-node 2 examples/train_accelerate.py --folder run --resume

The first run saves halfway; the second continues from there and ends with the same weights,
bit for bit.  The model learns to predict the bytes of this file: nothing is downloaded.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sparsync.integrations.accelerate import attach

CONTEXT = 8  # bytes from which the next one is predicted


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model with Accelerate.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps in total")
    parser.add_argument("--density", type=float, default=0.02, help="of the gradient, in (0, 1]")
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    return parser.parse_args()


def make_model() -> nn.Module:
    """Build a model that predicts a byte from those before it."""
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.Tanh(),
        nn.Linear(128, 256),
    )  # fmt: skip


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """Load windows of this file and the byte after each."""
    windows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, CONTEXT + 1, 1)
    data = TensorDataset(windows[:, :CONTEXT], windows[:, CONTEXT])
    return DataLoader(data, batch_size=32, shuffle=True, drop_last=True)


def digest(model: nn.Module) -> str:
    """Return a fingerprint that any changed bit of the weights changes."""
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train and print a summary."""
    options = arguments()
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    sync = attach(accelerator, model, density=options.density)  # the only new line
    checkpoint = options.folder / "halfway"
    step, losses = 0, []
    if options.resume:
        accelerator.load_state(checkpoint)
        step = options.steps // 2
    while step < options.steps:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for windows, following in accelerator.skip_first_batches(loader, done):
            loss = nn.functional.cross_entropy(model(windows), following)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            step += 1
            if step == options.steps // 2 and not options.resume:
                accelerator.save_state(checkpoint)
            if step == options.steps:
                break
    sent = sync.stats()["bytes_sent_per_step_max"]
    accelerator.print(
        f"{accelerator.num_processes} ranks, {step} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
        f"at most {sent:,} bytes sent per step, weights {digest(model)}"
    )
    sync.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
