"""Import in the fork server all that ranks need, so that no rank has to; only the server imports this."""

import gc

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel  # noqa: F401

import sparsync.checkpoint
import sparsync.gradients.ddp
import sparsync.gradients.replicas
import sparsync.published.baselines
import sparsync.published.oktopk
import sparsync.published.redsync
import sparsync.published.sparcml
import sparsync.published.wagma
import sparsync.testing
import sparsync.transports.zmq
import sparsync.updates.attach
import sparsync.updates.offload  # noqa: F401
import tests.distributed.fault_programs
import tests.on_ranks  # noqa: F401

# otherwise every rank's first collection would write to, and so copy, all pages that they share
gc.collect()
gc.freeze()
