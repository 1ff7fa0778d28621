"""A usual GPT trainer: ``torchrun --nproc-per-node 2 examples/train_gpt.py FOLDER [--resume]``."""

import argparse
from pathlib import Path

import torch
from torch import distributed, nn

import sparsync

STEPS, ACCUMULATE, BATCH, CONTEXT, WIDTH = 60, 2, 16, 64, 128


class GPT(nn.TransformerEncoder):
    """Reads windows of bytes; returns the loss of predicting each byte from the bytes before it."""

    def __init__(self) -> None:
        block = nn.TransformerEncoderLayer(WIDTH, 4, 512, 0.0, batch_first=True, norm_first=True)
        super().__init__(block, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = super().forward(self.token(windows[:, :-1]) + self.place.weight, mask)
        return nn.functional.cross_entropy(self.head(hidden).mT, windows[:, 1:])


parser = argparse.ArgumentParser()
parser.add_argument("folder", help="of checkpoints: one is saved at step 40")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
distributed.init_process_group("gloo")
torch.manual_seed(0)
text = b"".join(p.read_bytes() for p in sorted(Path(argparse.__file__).parent.glob("*.py")))
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)
held_out, *batches = windows[torch.randperm(len(windows))].long().split(BATCH)
mine = batches[distributed.get_rank() :: distributed.get_world_size()]
model = nn.parallel.DistributedDataParallel(GPT())
decayed, rest = ([p for p in model.parameters() if (p.dim() > 1) is d] for d in (True, False))
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], 1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, STEPS, cycle_momentum=False)
sync = sparsync.attach(model, optimizer)  # the only new line
saved = {"model": model.module, "optimizer": optimizer, "schedule": schedule}
first = sparsync.load(sync, options.folder, **saved)["step"] if options.resume else 0
with sync.shared(), torch.no_grad():  # the weights that all ranks share
    before = model.module(held_out)
for step in range(first, STEPS):
    for windows in mine[step * ACCUMULATE : (step + 1) * ACCUMULATE]:
        (model(windows) / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step + 1 == 40:
        sparsync.save(sync, options.folder, step=step + 1, **saved)
sent = sync.stats()["bytes_sent_per_local_step"] / sum(p.numel() for p in model.parameters())
sync.finish()  # exchanges the rest, after which all weights are equal
if distributed.get_rank() == 0:
    print(f"loss {before:.3f} -> {model.module(held_out):.6f}, {sent:.3f} bytes/parameter/step")
