"""Momentum correction, clipping and RedSync under a real DDP."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync import Correction
from tests.attaching import attach

from .small_model import flat, model, same_everywhere, train


def corrections() -> dict[str, bool]:
    """At density 1 the corrected training is torch's; below it replicas stay equal."""
    result = {}
    whole: dict[str, Any] = {"density": 1.0, "compress_thd": 0, "fusion_bytes": 2000}
    for nesterov in (False, True):
        ends = []
        for corrected in (True, False):
            ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
            options = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
            if corrected:
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
                correction = Correction(**options, masking=False)
                sync = attach(
                    ddp, "redsync", correction=correction, optimizer=optimizer, timeout=30, **whole
                )
            else:
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, **options)
            train(ddp, range(20), optimizer)
            ends.append(flat(ddp))
            if corrected:
                sync.close()
        equal = torch.allclose(*ends, rtol=1e-4, atol=1e-5)
        result[f"momentum SGD, nesterov={nesterov}"] = equal
    for name in ("redsync", "redsync-quantized"):
        for clip_norm in ("this", "previous"):
            result[f"{name}, clip {clip_norm}"] = _trains(name, clip_norm)
    return result


def _trains(name: str, clip_norm: str) -> bool:
    """Train sparsely with all there is; save and resume in the middle."""
    ends = []
    for resume in (False, True):
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        correction = Correction(0.9, weight_decay=0.01, clip=0.5, clip_norm=clip_norm)
        options: dict[str, Any] = {"compress_thd": 200, "fusion_bytes": 2000}
        options |= {"density": 0.1, "correction": correction, "timeout": 30}
        sync = attach(ddp, name, **options)
        train(ddp, range(5))
        if resume:
            state, weights = sync.state_dict(), ddp.module.state_dict()
            sync.close()
            fresh = model(seed=3)
            fresh.load_state_dict(weights)
            ddp = DistributedDataParallel(fresh)
            sync = attach(ddp, name, **options)
            sync.load_state_dict(state)
        train(ddp, range(5, 12))
        stats = sync.stats()
        methods = {layer["method"] for layer in stats["layers"]}
        assert methods == {"dense", "trimmed"}, methods
        assert set(stats["stages"]) == {"accumulate", "select", "pack", "communicate", "unpack"}
        assert dist.get_world_size() == 1 or all(s > 0 for s in stats["stages"].values())
        ends.append(flat(ddp))
        sync.close()
    return torch.equal(*ends) and same_everywhere(ends[0])
