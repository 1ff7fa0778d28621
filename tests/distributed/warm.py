"""Import in the fork server all that ranks need, so that no rank has to; only the server imports this."""

import gc
from importlib import import_module

gc.disable()  # everything imported here stays
for name in (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "sparsync.checkpoint",
    "sparsync.gradients.ddp",
    "sparsync.gradients.replicas",
    "sparsync.published.baselines",
    "sparsync.published.oktopk",
    "sparsync.published.redsync",
    "sparsync.published.sparcml",
    "sparsync.published.wagma",
    "sparsync.testing",
    "sparsync.transports.zmq",
    "sparsync.updates.attach",
    "sparsync.updates.offload",
    "tests.distributed.fault_programs",
    "tests.on_ranks",
):
    import_module(name)
# otherwise every rank's first collection would write to, and so copy, all pages that they share
gc.freeze()
gc.enable()
