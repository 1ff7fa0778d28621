"""Ranks come and go: start this as often as you like, on as many machines as you like, and kill any.

torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 500 --quorum_tick_ms 50 &
python examples/train_elastic.py http://HOST:29510
python examples/train_elastic.py http://HOST:29510        # ... and more of them, at any time
"""

import argparse
import os
from typing import Any

import torch
from torch import nn

import sparsync
from sparsync.elastic import make_manager

INPUTS, OUTPUTS, BATCH = 64, 8, 32


def main() -> None:
    """Train a small model until its last step, with all ranks that are present."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("lighthouse", help="address that torchft_lighthouse prints")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--min-replicas", type=int, default=1, help="below which training waits")
    parser.add_argument("--interface", help="name or address; default: that to the lighthouse")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, 128), nn.Tanh(), nn.Linear(128, OUTPUTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    data = torch.Generator().manual_seed(os.getpid())  # every rank draws different samples

    manager = make_manager(
        options.min_replicas, lighthouse=options.lighthouse, interface=options.interface
    )
    sync: Any
    with sparsync.attach(model, optimizer, elastic=manager) as sync:  # an elastic handle
        sync.carry(scheduler=scheduler)
        while sync.steps < options.steps and not sync.left:
            inputs = torch.randn(BATCH, INPUTS, generator=data)
            loss = nn.functional.mse_loss(model(inputs), (3 * inputs[:, :OUTPUTS]).sin())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if sync.steps % 100 == 0:
                there = sync.stats()["elastic"]["contributors"]
                print(f"step {sync.steps}: loss {loss.item():.3f}, {there} ranks", flush=True)
        sync.finish()
    os._exit(0)  # torchft's servers would keep the process alive


if __name__ == "__main__":
    main()
