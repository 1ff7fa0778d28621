"""Lightning with AdamW and one callback.  It saves every epoch, and can resume, bit for bit.

torchrun --nproc-per-node 2 examples/train_lightning.py FOLDER [--resume]    # after the first epoch
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsync.frameworks.lightning import SparsyncCallback

CONTEXT = 8  # number of bytes from which the next one is predicted


class Reader(lightning.LightningModule):
    """Predicts a byte from the bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.Tanh())
        self.net = nn.Sequential(nn.Embedding(256, 16), hidden, nn.Linear(128, 256))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[:, :-1]), batch[:, -1])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, help="of the checkpoints")
parser.add_argument("--resume", action="store_true", help="continue after the first epoch")
options = parser.parse_args()
lightning.seed_everything(0, verbose=False)
windows = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, CONTEXT + 1, 1)
windows = windows[torch.randperm(len(windows))]
held_out, training = DataLoader(windows[:1000], 32), DataLoader(windows[1000:], 32)
sparse = SparsyncCallback()  # the only new line
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_epochs=2, limit_train_batches=20,
    callbacks=[sparse, ModelCheckpoint(options.folder, "{epoch}", save_top_k=-1)],
    gradient_clip_val=1.0, enable_progress_bar=False, logger=False,
)  # fmt: skip
model = Reader()
before = trainer.validate(model, held_out, verbose=False)[0]["loss"]
start = options.folder / "epoch=0.ckpt" if options.resume else None
trainer.fit(model, training, held_out, ckpt_path=start)
after = trainer.validate(model, held_out, verbose=False)[0]["loss"]
size = sum(p.numel() for p in model.parameters())
if trainer.is_global_zero:
    sent = sparse.sync.stats()["bytes_sent_per_local_step"] / size
    print(f"loss {before:.3f} -> {after:.6f}, {sent:.3f} bytes per parameter and step")
