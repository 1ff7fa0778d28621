"""SparCML: allreduce of sparse streams that may become dense in flight, and quantised top-k SGD.

Cedric Renggli, Saleh Ashkboos, Mehdi Aghagolzadeh, Dan Alistarh and Torsten Hoefler, `SparCML:
High-Performance Sparse Communication for Machine Learning <https://arxiv.org/abs/1802.08021>`_, SC
2019.

The number of entries in a sum of sparse vectors is not known in advance.  So SparCML offers three
collectives: for small results, for large results, and for results that become dense in flight.  They are
lossless and reduce with any associative operation.  The preset "sparcml" is the paper's training
algorithm, which adds top-k selection and quantisation.

Terms
-----

============================================  ========================================================
in the paper                                  here
============================================  ========================================================
P nodes, p_i                                  ``world_size`` ranks, ``rank``
N, problem dimension                          n: ``size``
H_i, k = max size of H_i                      a rank's support; k of the collectives' bounds
K (script), entries of the sum                ``Job.result``, ``Job.summed`` of
                                              ``sparsync.collectives.costs``
sparse stream (5.1)                           ``SparseVector`` or ``DenseVector``;
                                              ``sparsync.wire.StreamCodec``
delta, switching to a dense format (5.1)      ``StreamCodec(factor=)``, ``StreamCodec.limit``
"in practice, delta should be even smaller"   ``factor`` below 1; measured in ``benchmarks/streams.md``
coordinate-wise operation, neutral element    ``op=``: ``sparsync.reduction.OPERATIONS``, ``Reduction``
SSAR_Recursive_double (5.3.1)                 ``RecursiveDoubling``, preset "recursive-doubling"
SSAR_Split_allgather (5.3.2)                  ``split_allgather``, preset "split-allgather"
DSAR_Split_allgather (5.3.3)                  ``Dynamic(always_dense=True)``, preset "dynamic"
dense ring, sparse ring (8.1)                 ``Ring``, presets "ring-dense" and "ring"
"some rough idea" of the result's size        learned by ``SparcmlAuto``, preset "sparcml-auto"
sparse allgather (5.2)                        ``sparsync.allgather``
L1(P), L2(P), alpha, beta_s, beta_d           ``cost(job)`` of each collective: messages and bytes
Lemmas 5.1 and 5.2                            ``lemma_5_1_words``, ``sum_bound_words`` in
                                              ``sparsync.collectives.costs``
Algorithm 1, Quantized TopK SGD               preset "sparcml"
acc, epsilon                                  accumulated; the residual (``sparsync.feedback.residual``)
TopK, k of every 512 elements (8.3)           ``sparsync.selection.Blockwise``, ``block=``
Q, QSGD (section 6)                           ``sparsync.wire.Qsgd``; sparse vectors: ``SparseQsgd``
bucket of B entries, scaling factor           ``quantization_block=`` and ``scale=`` of "sparcml";
                                              ``block=`` and ``scale=`` of the codecs
2, 4 and 8 bits per entry (section 6)         ``bits=``
low precision in the second half of DSAR      ``quantize="reduced"``; ``StreamCodec(dense=Qsgd(...))``
non-blocking operations (section 7)           ``sparsync.iallreduce``
MPI-OPT (sections 7 and 8.2)                  ``sparsync.published.sparcml.linear``
SGD, SCD, Webspam and URL (8.2)               ``Sgd``, ``Scd``, ``load_shard`` of
                                              ``sparsync.published.sparcml.linear``
settings of section 8                         ``SPARCML_SETTINGS``
block-momentum SGD, BMUF (8.4)                scheme "bmuf" of ``sparsync.updates``
fill-in, E[K] (appendix B)                    ``sparsync.collectives.costs.expected_union``
Lemma C.3, Theorem C.4 (appendix C)           ``sgd_bounds.lemma_c_3``, ``sgd_bounds.theorem_c_4``
============================================  ========================================================

Run it
------

The exact sum of sparse vectors, without a model::

    vector = sparsync.SparseVector.from_dense(torch.eye(100)[3])
    total = sparsync.allreduce(vector, sparsync.connect(), algorithm="sparcml-auto").total

Another operation::

    largest = sparsync.allreduce(vector, sparsync.connect(), algorithm="dynamic", op="max").total

Algorithm 1 with DDP and SGD.  It applies the *sum* of the gradients, so if a learning rate was tuned for
means, divide it by P::

    sync = sparsync.attach(ddp_model, optimizer, "sparcml", density=16 / 512)

With the settings of an experiment in section 8::

    from sparsync.published.sparcml import SPARCML_SETTINGS

    sync = sparsync.attach(ddp_model, optimizer, **SPARCML_SETTINGS["cifar-10"])

Quantisation as in section 6, with 2 bits and buckets of 512 entries in the dense half of DSAR::

    algorithm = sparsync.presets.resolve(
        "sparcml", quantize="reduced", bits=2, quantization_block=512
    )
    sync = sparsync.attach(ddp_model, optimizer, algorithm, density=16 / 512)
    sync.stats()["options"]  # those given: {"bits": 2, "quantization_block": 512, "quantize": "reduced"}

The following commands use virtual ranks.  They accept names from the paper (in upper or lower case) and
from this library; options follow a colon::

    sparsync bench --collectives SSAR_Recursive_double,SSAR_Split_allgather,DSAR_Split_allgather --ranks 8
    sparsync bench --collectives ring,sparcml:bits=none,sparcml:bits=2 --ranks 8 --size 100000 --steps 2

MPI-OPT (needs ``pip install 'sparsync[linear]'``)::

    sparsync linear --transport sim --ranks 4 --steps 2 --epochs 1 --compare SSAR_Recursive_double,dense

Differs from the paper
----------------------

* **P** may be any number of ranks, as the paper's appendix A sketches: surplus ranks are folded into
  their neighbours.
* **Merges follow rank order**, not arrival order, so results are bitwise equal on every rank and in every
  run.
* **Partial results of recursive doubling may become dense** in flight.  In the paper, this happens only
  in DSAR.
* **The switch to dense compares the two codecs' bytes**, whatever the codecs are.  For COO, this gives
  the paper's delta, ``N i / (c + i)``.
* **Regions stay sparse where that is shorter** in ``Dynamic``.  The choice is made for each region, as in
  the variant that Ok-Topk calls "TopkDSA".  With ``always_dense=True`` (the preset "dynamic"), all
  regions are dense, as published.
* **A rank sends at most ``cap * k`` of its selected entries** (``cap`` is 1.0 by default).  ``cap=None``
  sets no limit, as published.
* **The size of the result is learned** from the last total ("sparcml-auto"), which ``allreduce`` stores
  with the communicator.  No hint from the user is needed.
* **Neutral elements are never sent**: a missing element stands for the operation's neutral element.
* **Quantisation applies either to the selected entries** (``quantize="local"``, the default), as in
  Algorithm 1, **or to the dense half of DSAR** (``quantize="reduced"``), as in section 6.
* **The quantiser is reproducible**: its random numbers depend on seed, rank and step.  Its scale is the
  largest magnitude of a block ("max"), as in QSGD's experiments; ``scale="l2"`` is the scale of QSGD's
  analysis.  The paper does not say which one it uses.
* **The quantisation error** is discarded, as published, and reported (``stats()["lost_norm"]``).  The
  sender reports it for selected values, and the region's owner for a reduced sum.  With
  ``keep_error=True``, that rank's residual keeps the error, and decoded values are shrunk so that the
  residual cannot grow without bound.
* **The residual holds gradients**, not gradients times the learning rate.
* **MPI-OPT** has an intercept, which is not penalised.  Asynchronous steps have a fixed delay, so that
  runs are reproducible.  The paper does not say how a rank obtains the derivatives at other ranks' rows
  in SCD; ``Scd`` documents its choice.

Not here
--------

* Algorithm 1 with the learning rate in the residual:
  ``sparsync_papers.baseline_optimizers.UpdateSpaceSGD`` with "sparcml".
* Momentum correction and warm-up, which section 8.4 mentions, are available for every algorithm:
  ``sparsync.Correction`` and ``Compression(warmup_steps=)``.
* ResNet-110 on CIFAR-10, LSTMs on ATIS and Hansards, wide ResNets on ImageNet:
  ``sparsync_papers.models`` and ``sparsync_papers.workloads``.  The speech model of section 8.4 is not
  public.
* URL and Webspam data: ``sparsync linear --data`` reads files in LIBSVM format.  Without a file, it
  builds a data set of trigrams from Python's own sources (``docs/linear.md``).
* CNTK, and the comparison with Apache Spark.

Figures
-------

* ``benchmarks/sparcml.md``: loss of "sparcml" and dense training for a range of learning rates.
* ``benchmarks/fill_in.md``: density of the sum as P grows (Figure 1).
* ``benchmarks/streams.md``: the density above which a dense stream is faster.
* ``benchmarks/linear.md``: linear models on real links (Table 2, SCD).
* ``benchmarks/reproduced.md``: Figures 1 and 3 to 7 and Table 2 next to the paper's numbers, produced by
  ``sparsync reproduce sparcml-fig3`` and similar commands.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import Preset, row
from sparsync.published.sparcml.collectives import (
    Dynamic,
    RecursiveDoubling,
    Ring,
    SparcmlAuto,
    SparcmlAutoState,
    split_allgather,
)
from sparsync.published.sparcml.presets import SPARCML_SETTINGS, sparcml
from sparsync.selection import Everything

__all__ = [
    "ROWS",
    "SPARCML_SETTINGS",
    "Dynamic",
    "RecursiveDoubling",
    "Ring",
    "SparcmlAuto",
    "SparcmlAutoState",
    "sparcml",
    "split_allgather",
]

_RING = "SparCML, section 8.1"

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "algorithms": {
            "split-allgather": row(
                "split-allgather", split_allgather, "SparCML, section 5.3.2", planned=True
            ),
            "recursive-doubling": row(
                "recursive-doubling", RecursiveDoubling, "SparCML, section 5.3.1", planned=True
            ),
            "dynamic": row(
                "dynamic", partial(Dynamic, always_dense=True), "SparCML, section 5.3.3"
            ),
            "ring": row("ring", Ring, _RING),
            "ring-dense": row(
                "ring-dense", partial(Ring, cap=None, dense=True), _RING, selector=Everything
            ),
            "sparcml": Preset(sparcml, "SparCML, section 5.3.3"),
            "sparcml-auto": row("sparcml-auto", SparcmlAuto, "SparCML, section 5.3"),
        },
        "aliases": {
            "SSAR_Recursive_double": "recursive-doubling",
            "SSAR_Split_allgather": "split-allgather",
            "DSAR_Split_allgather": "dynamic",
            "sparse ring": "ring",
            "dense ring": "ring-dense",
            "Quantized TopK SGD": "sparcml",
        },
    }
)
