"""Ray Train with AdamW and one new line.  If a worker dies, Ray continues from a checkpoint.

    python examples/ray_train.py --folder DIR --kill 25

Four workers on CPUs learn scikit-learn's digits and save a checkpoint every 10 steps.  At step 25, the
last worker kills itself.  Without ``--kill``, the final weights are the same, bit for bit: compare the
digests.
"""

import argparse
import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn

import sparsync
from sparsync.checkpoint import load_states, save_state

HELD_OUT = 297  # of 1,797 digits
BATCH = 128  # digits per step, over all ranks


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train on one worker, from the last checkpoint or from the beginning, to the end."""
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    images, digits = options["images"], options["digits"]
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sync = sparsync.attach(model, optimizer)  # the only new line
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            load_states(sync, Path(folder), weights="")
        first = sync.stats()["local_steps"]
    for step in range(first, options["steps"]):
        if step == options["kill"] and first == 0 and rank == ranks - 1:
            ray.train.get_all_reported_checkpoints()  # waits until Ray has registered the last one
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(HELD_OUT, len(digits), (BATCH,), generator=generator)[rank::ranks]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), digits[batch])
        loss.backward()
        optimizer.step()
        if (step + 1) % options["save_every"] == 0:
            with tempfile.TemporaryDirectory() as folder:  # Ray merges all ranks' folders
                save_state(sync, Path(folder), weights="")  # the state includes the weights
                metrics = {"step": step + 1, "first": first, "loss": loss.item()}
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
    sync.finish()  # exchanges the rest, after which all weights are equal
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(images[:HELD_OUT]), digits[:HELD_OUT])
    sync.close()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return {"loss": loss.item(), "digest": hashlib.sha256(weights).hexdigest()[:16]}


def main() -> None:
    """Start Ray on this machine, train, and print a summary."""
    parser = argparse.ArgumentParser(description="Train on digits with Ray Train.")
    parser.add_argument("--folder", required=True, help="for checkpoints; all workers see it")
    parser.add_argument("--workers", type=int, default=4, help="ranks, with one CPU each")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--kill", type=int, help="step, after a checkpoint, at which the last dies")
    options = parser.parse_args()
    folder = str(Path(options.folder).resolve())
    images, digits = map(torch.tensor, load_digits(return_X_y=True))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # "auto" would join an existing cluster; the workers' output goes to the logs of Ray's session
    ray.init("local", num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(options), "images": images.float() / 16, "digits": digits},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3)),
    )
    result: Any = trainer.fit()
    ray.shutdown()
    reports = [metrics for _, metrics in result.best_checkpoints]  # all reports, in order of time
    for report in reports:
        print(f"step {report['step']}: loss {report['loss']:.4f}")
    restarts = sorted({report["first"] for report in reports} - {0})
    end = "loss {loss:.6f}, digest {digest}".format(**result.return_value)
    print(f"{end}, restarts: {len(restarts)}, at steps {restarts}")


if __name__ == "__main__":
    main()
