"""RedSync: residual gradient compression, layer by layer, with selection that suits a GPU.

Jiarui Fang and Cho-Jui Hsieh, `RedSync: Reducing Synchronization Traffic for Distributed Deep Learning
<https://arxiv.org/abs/1808.04357>`_, 2018.  This room follows that text; a later version, with Haohuan
Fu and Guangwen Yang, is in the Journal of Parallel and Distributed Computing, 2019.

Every layer sends the k largest entries of its residual, found by the method that suits the layer's
size, and an allgather gives all of them to every rank.  Momentum is corrected before the exchange.  The
preset "redsync" is RGC; "redsync-quantized" sends indices and one mean per layer.

Terms
-----

============================================  ========================================================
in the paper                                  here
============================================  ========================================================
RGC, Quantized-RGC (section 6)                presets "redsync" and "redsync-quantized"
N nodes, p in section 5.4                     P: ``world_size`` ranks
D, density ratio                              ``density=``; k of a layer is D times its elements
residual V, Algorithm 1 (RGC)                 accumulated; the residual (``sparsync.feedback.residual``)
communication-set                             selected entries
communication-set-selection                   a ``Selector``; of every layer its own: ``Layered``
Masks, V (1 - Masks)                          the residual less ``Reduced.delivered``
trimmed top-k (5.2.1, Algorithm 2)            ``Trimmed``
threshold binary search (5.2.2, Algorithm 3)  ``BinarySearch``
sampled threshold binary search               ``BinarySearch(reuse_period=5)``; ``reuse_period=``
RadixSelect, exact top-k                      ``sparsync.selection.Exact``
selection by sampling (Lin et al., 2017)      ``sparsync.selection.Sampled``
Algorithm 5, thsd1, thsd2                     ``BySize``; ``thsd1=``, ``thsd2=`` (4 MB)
compress_thd (Algorithm 4)                    ``compress_thd=`` (128 KB): smaller layers are dense units
largest k and smallest k by turns (5.2.3)     ``OneSigned``
quantization: one mean for all values         ``SignMean``, a codec
"we do not quantify the output layer"         ``Algorithm.output``; ``Compression(output_layer=)``
sparse synchronization, allgather (5.3)       ``sparsync.collectives.Allgather``
tensor fusion (5.3)                           ``fusion_bytes=``: layers that share a unit and a message
Algorithm 4: momentum correction, U           ``sparsync.Correction(momentum=, nesterov=)``,
                                              ``sparsync.feedback.correction``
momentum (factor) masking                     ``Correction(masking=)``
weight decay of Algorithm 4                   ``Correction(weight_decay=)``
local clipping, N^-1/2 (5.5)                  ``Correction(clip=)``
overlap for CNNs, none for RNNs (5.5)         fused layers leave during the backward pass; with
                                              ``Correction(clip=)`` after it
warm-up training (5.6)                        ``Compression(warmup_steps=)``: dense first steps;
                                              ``warmup_densities=DGC_RAMP``: 25 %, 6.25 %, ..., 0.1 %
Equations 1 and 2, appendix B                 ``sparsync_papers.redsync_costs``
parts of a step (Figure 10)                   ``sync.stats()["stages"]``; ``Communicator.stage``
============================================  ========================================================

Run it
------

With a model in DDP, and an SGD that has neither momentum nor weight decay of its own::

    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    correction = sparsync.Correction(momentum=0.9, nesterov=True, weight_decay=1e-4)
    sync = sparsync.attach(ddp_model, optimizer, "redsync", density=0.001, correction=correction)

Quantised, as published, without keeping the rounding error::

    algorithm = sparsync.presets.resolve("redsync-quantized", keep_error=False)
    sync = sparsync.attach(ddp_model, optimizer, algorithm, density=0.001, correction=correction)

A recurrent network, whose gradients are clipped (section 5.5)::

    correction = sparsync.Correction(momentum=0.9, clip=0.25)
    sync = sparsync.attach(ddp_model, optimizer, "redsync", density=0.001, correction=correction)

On virtual ranks, and the selectors of Figure 3::

    sparsync simulate --algorithm redsync,redsync-quantized --ranks 8 --model-size 100000
    sparsync bench --selectors --sizes 64KB,256KB

Differs from the paper
----------------------

* **Algorithm 2** ends when at least k entries reach the threshold; as printed, it goes on while more
  than k do.  All candidate thresholds are counted in one pass.  Exactly k entries are taken.
* **Algorithm 3** bisects ratios; as printed, thresholds are assigned to their bounds, and the wrong
  bound moves between k / 2 and k.  Where it stops on epsilon without k to 2 k entries, the k largest
  are taken.
* **The counter of the reuse** belongs to the layer; as printed in Algorithm 5 it is 0 in every call.  A
  reused threshold takes at most 2 k entries (``cap=2.0``); None: any number, as published.
* **Layers of no size are selected by exact top-k** (``thsd1=None``), as in section 5.4; Algorithm 5 has
  that tier as well, below ``thsd1``.
* **The signs never mix** in "redsync-quantized"; the paper's "smallest k" take positive values where
  fewer than k are negative.
* **The quantised mean's error stays in the residual** (``keep_error=True``); the paper drops it.
* **Layers travel in fused messages** of 4 MB, each layer with its own selection and mean; the paper
  gives no size.
* **Weight decay reaches the residual**; Algorithm 4 adds it to a gradient that it then does not use.
* **Nesterov momentum** is torch's: ``U = m (U + g); V = V + U + g``.
* **Masking spares parameters that are exchanged dense**: they were never late.
* **Local gradients are clipped to sqrt(P) times the norm**; the paper's N^-1/2 is for gradients that
  are divided by N already.  ``clip_norm="previous"`` lets layers overlap with the backward pass all the
  same, which the paper does without.
* **The average is applied** by the optimizer, with its learning rate; line 48 of Algorithm 4 has
  neither minus nor 1 / N.
* **A message** has a header that describes it, and the paper's length in it.

Not here
--------

* The cost model as a module: ``sparsync_papers.redsync_costs``; ``sparsync plan`` uses this project's.
* ResNet-44 and VGG-16 on CIFAR-10, AlexNet, VGG-16 and ResNet-50 on ImageNet, LSTMs on Penn Treebank
  and WikiText-2: ``sparsync_papers.models`` and ``sparsync_papers.workloads``.
* Momentum correction, masking, clipping and warm-up stand in ``sparsync.feedback``: they work with
  every algorithm.
* The paper's times on GPUs: kernels for GPUs are ``sparsync.kernels.triton``, and
  ``benchmarks/selection.md`` measures CPUs.

Figures
-------

* ``benchmarks/redsync.md``, ``benchmarks/redsync-long.md``: loss and accuracy against dense.
* ``benchmarks/redsync_phases.md``: where a step goes over P (Figure 10).
* ``benchmarks/selection.md``: time of the selectors over the size of the residual (Figure 3).
* ``benchmarks/reproduced.md``: Figures 3 and 6 to 10 and Tables 1 and 2 next to the paper's numbers, by
  ``sparsync reproduce redsync-fig3`` and so on.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import Preset
from sparsync.published.redsync.presets import redsync, redsync_quantized
from sparsync.published.redsync.selectors import BinarySearch, BySize, Layered, OneSigned, Trimmed
from sparsync.published.redsync.sign_mean import SignMean
from sparsync.selection import Exact

__all__ = [
    "ROWS",
    "BinarySearch",
    "BySize",
    "Layered",
    "OneSigned",
    "SignMean",
    "Trimmed",
    "redsync",
    "redsync_quantized",
]

_COST = "RedSync, Equation 1"

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "algorithms": {
            "redsync": Preset(redsync, _COST, corrects=True),
            "redsync-quantized": Preset(redsync_quantized, _COST, corrects=True),
        },
        "selectors": {
            "trimmed": Trimmed,
            "binary search": BinarySearch,
            "by size": BySize,
            "one-signed": lambda: OneSigned(Exact()),
            "layered": partial(Layered, Exact),
        },
        "codecs": {"sign-mean": SignMean()},
        "aliases": {
            "RGC": "redsync",
            "Quantized-RGC": "redsync-quantized",
            "quant RGC": "redsync-quantized",
            "redsync-quantised": "redsync-quantized",
        },
    }
)
