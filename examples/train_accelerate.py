"""Accelerate with AdamW and one new line.  It saves halfway, and can resume from there, bit for bit.

torchrun --nproc-per-node 2 examples/train_accelerate.py FOLDER [--resume]
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from sparsync.frameworks.accelerate import attach

STEPS = 40
CONTEXT = 8  # number of bytes from which the next one is predicted

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="of the checkpoint")
parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
options = parser.parse_args()
set_seed(0)
windows = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, CONTEXT + 1, 1)
held_out, training = windows[torch.randperm(len(windows))].tensor_split([1000])
model = nn.Sequential(
    nn.Embedding(256, 16),
    nn.Flatten(),
    nn.Linear(16 * CONTEXT, 128),
    nn.Tanh(),
    nn.Linear(128, 256),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
accelerator = Accelerator(cpu=True)
loader = DataLoader(training, batch_size=32)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
sync = attach(accelerator, model)  # the only new line
first = 0
if options.resume:
    accelerator.load_state(options.folder)
    first = STEPS // 2
with sync.shared(), torch.no_grad():  # the weights that all ranks share
    before = nn.functional.cross_entropy(model(held_out[:, :-1]), held_out[:, -1])
loader = accelerator.skip_first_batches(loader, first)
for step, batch in zip(range(first, STEPS), loader, strict=False):
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 == STEPS // 2:
        accelerator.save_state(options.folder)
sent = sync.stats()["bytes_sent_per_local_step"] / sum(p.numel() for p in model.parameters())
sync.finish()  # exchanges the rest, after which all weights are equal
after = nn.functional.cross_entropy(model(held_out[:, :-1]), held_out[:, -1])
accelerator.print(f"loss {before:.3f} -> {after:.6f}, {sent:.3f} bytes per parameter and step")
sync.close()
accelerator.end_training()
