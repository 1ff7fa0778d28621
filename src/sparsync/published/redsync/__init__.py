"""RedSync: residual gradients are compressed layer by layer, by selectors that suit a GPU.

Jiarui Fang and Cho-Jui Hsieh, `RedSync: Reducing Synchronization Traffic for Distributed Deep Learning
<https://arxiv.org/abs/1808.04357>`_, 2018.  This package follows that text; a later version, with Haohuan
Fu and Guangwen Yang, is in the Journal of Parallel and Distributed Computing, 2019.

Every layer contributes the k largest entries of its residual, selected by a method that depends on the
layer's size.  An allgather delivers these entries to every rank.  Momentum is corrected before the
exchange.  The preset "redsync" is RGC; "redsync-quantized" sends only the indices and one mean per layer.

Terms
-----

============================================  ========================================================
in the paper                                  here
============================================  ========================================================
RGC, Quantized-RGC (section 6)                presets "redsync" and "redsync-quantized"
N nodes, p in section 5.4                     P: ``world_size`` ranks
D, density ratio                              ``density=``; a layer's k is D times its elements
M, size of a layer                            bytes of its float32 elements
residual V, Algorithm 1 (RGC)                 accumulated; the residual (``sparsync.feedback.residual``)
communication-set                             selected entries
communication-set-selection                   a ``Selector``; one per layer: ``Layered``
Masks, V (1 - Masks)                          the residual less ``Reduced.delivered``
trimmed top-k (5.2.1, Algorithm 2)            ``Trimmed``
epsilon of Algorithm 2: 0.2                   ``Trimmed(eps=0.2)``: the step between thresholds
threshold binary search (5.2.2, Algorithm 3)  ``BinarySearch``
epsilon of Algorithm 3 (no value given)       ``BinarySearch(eps=0.001)``: the width at which it gives up
sampled threshold binary search, interval 5   ``BinarySearch(reuse_period=5)``; ``reuse_period=``
count_nonzero, filter (stream compaction)     ``sparsync.kernels.count_from``, ``sparsync.kernels.find``
RadixSelect, exact top-k                      ``sparsync.selection.Exact``
selection by sampling (Lin et al., 2017)      ``sparsync.selection.Sampled``
Algorithm 5, Communication-set Selection      ``BySize``: chooses a method by the layer's bytes
compress_thd (Algorithm 4): 128 KB            ``compress_thd=``; smaller layers are dense units
thsd1, thsd2 (Algorithm 5): 128 KB, 4 MB      ``thsd1=``, ``thsd2=``: least size for trimmed and search
largest and smallest k alternately (5.2.3)    ``OneSigned``
flag of the alternation                       ``OneSignedState``, one per layer
quantization: one mean for all values         ``SignMean``, a codec
"we do not quantify the output layer"         ``Algorithm.output``; ``Compression(output_layer=)``
sparse synchronization, allgather (5.3)       ``sparsync.collectives.Allgather``
tensor fusion (5.3)                           ``fusion_bytes=``: layers fused into one message
Algorithm 4: momentum correction, U           ``sparsync.Correction(momentum=, nesterov=)``,
                                              ``sparsync.feedback.correction``
momentum (factor) masking                     ``Correction(masking=)``
weight decay of Algorithm 4                   ``Correction(weight_decay=)``
local clipping, N^-1/2 (5.5)                  ``Correction(clip=)``
overlap for CNNs, none for RNNs (5.5)         fused layers are sent during the backward pass, or after
                                              it with ``Correction(clip=)``
warm-up training (5.6)                        ``Compression(warmup_steps=)``: the first steps are dense;
                                              ``warmup_densities=DGC_RAMP``: 25 %, 6.25 %, ..., 0.1 %
async_allgather, handle, synchronize          a unit's exchange on a thread; the step's commit
Equations 1 and 2, appendix B                 ``equation_1``, ``equation_2`` of
                                              ``sparsync.published.redsync.cost_model``
T_select, gamma_1, gamma_2                    their arguments ``select=``, ``unpack=``, ``gamma=``
rules for the parameter size (5.4)            ``size_thresholds``
parts of a step (Figure 10)                   ``sync.stats()["stages"]``; ``Communicator.stage``
mask (Figure 10)                              "accumulate" (the residual) and "mask" (momentum, and
                                              removal of delivered entries)
============================================  ========================================================

Run it
------

With a model in DDP, and SGD without momentum or weight decay::

    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    correction = sparsync.Correction(momentum=0.9, nesterov=True, weight_decay=1e-4)
    sync = sparsync.attach(ddp_model, optimizer, "redsync", density=0.001, correction=correction)

Quantised as published, discarding the rounding error::

    algorithm = sparsync.presets.resolve("redsync-quantized", keep_error=False)
    sync = sparsync.attach(ddp_model, optimizer, algorithm, density=0.001, correction=correction)

A recurrent network, whose gradients are clipped (section 5.5)::

    correction = sparsync.Correction(momentum=0.9, clip=0.25)
    sync = sparsync.attach(ddp_model, optimizer, "redsync", density=0.001, correction=correction)

``attach`` warns if the optimizer has momentum, which would act on delayed entries.  It also reports if
the dense layers below ``compress_thd`` account for most of a step's bytes.

The selectors alone, on one layer::

    from sparsync.published.redsync import BinarySearch, BySize, OneSigned, Trimmed

    layer = torch.randn(100_000)
    for selector in (Trimmed(), BinarySearch(reuse_period=5), OneSigned(Trimmed()), BySize()):
        print(selector.select(layer, k=100, step=0).nnz)

The default size thresholds are the paper's, for 3.5 GB/s.  For other networks, the cost model computes
thresholds under the names of the preset's options::

    from sparsync.published.redsync import size_thresholds

    policy = size_thresholds(world_size=8, density=0.001, alpha=0, beta=1 / 0.125e9)
    algorithm = sparsync.presets.resolve("redsync", **policy._asdict())

The table lists the thresholds in KB at D = 0.1 %, for fused layers on a GPU (the defaults of
``SelectionTimes``).  The paper uses 128 KB for the first row, and prefers trimming up to 4 MB so that
messages have a fixed length.  "never" means that a binary search does not pay off: it selects up to twice
as many entries, and sending these takes more time than the search saves.

=========  ===  ==============  =======  =======
network    P    compress_thd    thsd1    thsd2
=========  ===  ==============  =======  =======
3.5 GB/s   8    101             101      101
3.5 GB/s   32   188             188      never
3.5 GB/s   128  204             204      never
1.5 GB/s   8    42.8            42.8     42.8
1.5 GB/s   32   79.1            79.1     never
1.5 GB/s   128  85.9            85.9     never
10 Gbit/s  8    71.2            71.2     never
10 Gbit/s  32   65.8            65.8     never
10 Gbit/s  128  71.4            71.4     never
1 Gbit/s   8    7.04            7.04     never
1 Gbit/s   32   6.52            6.52     never
1 Gbit/s   128  7.06            7.06     never
=========  ===  ==============  =======  =======

The first two commands use virtual ranks, with the paper's names or with options after a colon.  The third
times the selectors of Figure 3.  The last one compares training with dense training, on real processes::

    sparsync simulate --algorithm RGC,Quantized-RGC --ranks 8 --model-size 100000
    sparsync bench --collectives redsync:thsd1=4096,redsync:reuse_period=1 --ranks 4 --size 9999 --steps 2
    sparsync bench --selectors --sizes 64KB,256KB
    sparsync train --algorithm dense,redsync --workload lstm --density 0.001 --ranks 2 --steps 4

Differs from the paper
----------------------

* **Algorithm 2** ends when at least k entries reach the threshold.  As printed, it continues while more
  than k entries reach it, which contradicts the text.  A single pass counts the entries above all
  candidate thresholds; it costs no more than a pass for one threshold.  Exactly k entries are selected.
* **Algorithm 3** bisects ratios.  As printed, thresholds are assigned to the bounds of the ratios, and
  the wrong bound is changed for counts between k / 2 and k.  If the search reaches epsilon without
  finding k to 2k entries (because of ties or a few huge entries), the k largest are selected.
* **Every layer has a reuse counter.**  Algorithm 5 as printed resets it to 0 in every call, so every call
  would search.  A reused threshold selects at most 2k entries (``cap=2.0``).  This bounds the size of
  messages, so ranks need no extra round to exchange their lengths.  ``cap=None`` sets no limit, as
  published.
* **Exact top-k is not used by default** (``thsd1=None``), as in section 5.4.  Algorithm 5 uses it for
  layers below ``thsd1``.
* **The signs never mix** in "redsync-quantized", because the mean of mixed signs would be near zero.  The
  paper's "smallest k" include positive values if fewer than k are negative.
* **Every layer alternates between the signs.**  Algorithm 5 as printed sets the flag to true in every
  call, so the smallest k would never be sent.
* **The error of the quantised mean stays in the residual** (``keep_error=True``) and is delivered later.
  The paper drops it.
* **Layers are fused into messages** of 4 MB; each layer keeps its own selection and mean.  The paper
  gives no size.
* **Weight decay reaches the residual**.  Algorithm 4 adds it to a gradient that is never used afterwards.
* **Nesterov momentum** is PyTorch's, ``U = m (U + g); V = V + U + g``, so training at density 1 is
  identical to ``torch.optim.SGD``.  Algorithm 4 adds g to V a second time.
* **Masking skips parameters that are exchanged dense**, because their entries are never delayed.
* **Local gradients are clipped to sqrt(P) times the norm**.  The paper's factor N^-1/2 is for gradients
  that have already been divided by N.  With ``clip_norm="previous"``, clipping allows overlap with the
  backward pass, which the paper forgoes.
* **The optimizer applies the average**, with its learning rate.  Line 48 of Algorithm 4 has neither the
  minus sign nor the factor 1 / N.
* **Every message** has a header in addition to the paper's length field, so that a receiver can detect
  damaged bytes and ranks with different settings.

Not here
--------

* Choosing the size thresholds during training: call ``size_thresholds`` once beforehand.  ``sparsync
  plan`` and "auto" use the library's own cost model (``docs/planning.md``).
* ResNet-44 and VGG-16 on CIFAR-10, AlexNet, VGG-16 and ResNet-50 on ImageNet, LSTMs on Penn Treebank
  and WikiText-2: ``sparsync_papers.models`` and ``sparsync_papers.workloads``.
* Momentum correction, masking, clipping and warm-up work with every algorithm, and live in
  ``sparsync.feedback``.
* The paper's timings on GPUs.  The GPU kernels are in ``sparsync.kernels.triton``;
  ``benchmarks/selection.md`` measures CPUs.

Figures
-------

* ``benchmarks/redsync.md``, ``benchmarks/redsync-long.md``: loss and accuracy compared with dense.
* ``benchmarks/redsync_phases.md``: time per phase of a step as P grows (Figure 10).
* ``benchmarks/selection.md``: time of the selectors as the residual grows (Figure 3).
* ``benchmarks/reproduced.md``: Figures 3 and 6 to 10 and Tables 1 and 2 next to the paper's numbers,
  produced by ``sparsync reproduce redsync-fig3`` and similar commands.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import Preset
from sparsync.published.redsync.cost_model import SizeThresholds, size_thresholds
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
    "SizeThresholds",
    "Trimmed",
    "redsync",
    "redsync_quantized",
    "size_thresholds",
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
