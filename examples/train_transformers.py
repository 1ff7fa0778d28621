"""Hugging Face Trainer with its AdamW and one callback.  It saves, and can resume, bit for bit.

torchrun --nproc-per-node 2 examples/train_transformers.py FOLDER [--resume]    # from step 20
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from sparsync.frameworks.transformers import SparsyncCallback

CONTEXT = 32  # bytes in a window

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path, help="of the checkpoints")
parser.add_argument("--resume", action="store_true", help="continue from the first checkpoint")
options = parser.parse_args()
set_seed(0)
windows = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, CONTEXT, 1)
rows = [{"input_ids": row, "labels": row} for row in windows]  # the model shifts the labels itself
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )
)  # fmt: skip
settings = TrainingArguments(
    output_dir=str(options.folder),
    use_cpu=True,
    ddp_backend="gloo",
    max_steps=40,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    warmup_steps=5,
    lr_scheduler_type="cosine",
    eval_strategy="steps",
    eval_steps=20,
    eval_on_start=True,
    save_steps=20,
    report_to="none",
    disable_tqdm=True,
    ddp_find_unused_parameters=False,
)
trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows[::200])
sparse = SparsyncCallback(trainer)
trainer.add_callback(sparse)  # the only new lines
trainer.train(resume_from_checkpoint=options.folder / "checkpoint-20" if options.resume else None)
before, after = trainer.state.log_history[0]["eval_loss"], trainer.evaluate()["eval_loss"]
sent = (
    sparse.sync.stats()["bytes_sent_per_local_step"] / model.num_parameters()
)  # includes the exchange at the end
sparse.close()
if trainer.is_world_process_zero():
    print(f"loss {before:.3f} -> {after:.6f}, {sent:.3f} bytes per parameter and step")
