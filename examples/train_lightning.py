"""Lightning with sparse synchronisation: one callback, also on CPU, where ``ddp_comm_hook`` is ignored.

    python examples/train_lightning.py --folder run
    torchrun --nproc-per-node 2 examples/train_lightning.py --folder run --resume

The first run saves after every epoch; the second continues from the first epoch's checkpoint and ends
with the same weights, bit for bit.  The model learns to predict the bytes of this file: nothing is
downloaded.
"""

import argparse
import hashlib
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sparsync.integrations.lightning import SparsyncCallback

CONTEXT = 8  # bytes from which the next one is predicted


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small model with Lightning.")
    parser.add_argument("--epochs", type=int, default=2, help="in total")
    parser.add_argument("--steps", type=int, default=20, help="batches per epoch")
    parser.add_argument("--density", type=float, default=0.02, help="of the gradient, in (0, 1]")
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue after the first epoch")
    return parser.parse_args()


class Reader(lightning.LightningModule):
    """Predicts a byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.Tanh(),
            nn.Linear(128, 256),
        )  # fmt: skip
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        windows, following = batch
        loss = nn.functional.cross_entropy(self.net(windows), following)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer: unchanged by sparsync."""
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


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
    lightning.seed_everything(0, verbose=False)
    sparse = SparsyncCallback(density=options.density)  # the only new line
    checkpoints = ModelCheckpoint(options.folder, "{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=options.devices,
        max_epochs=options.epochs,
        limit_train_batches=options.steps,
        callbacks=[sparse, checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Reader()
    start = options.folder / "epoch=0.ckpt" if options.resume else None
    trainer.fit(model, make_loader(), ckpt_path=start)
    if trainer.is_global_zero:
        assert sparse.sync is not None
        sent = sparse.sync.stats()["bytes_sent_per_step_max"]
        print(
            f"{trainer.world_size} ranks, {trainer.global_step} steps: "
            f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}, "
            f"at most {sent:,} bytes sent per step, weights {digest(model)}"
        )


if __name__ == "__main__":
    main()
