"""Ok-Topk: a sparse allreduce with O(k) volume on any number of ranks; it can reuse thresholds.

Shigang Li and Torsten Hoefler, `Near-Optimal Sparse Allreduce for Distributed Deep Learning
<https://doi.org/10.1145/3503221.3508399>`_, PPoPP 2022 (27th ACM SIGPLAN Symposium on Principles and
Practice of Parallel Programming).

Every rank selects its k largest entries.  The vector is cut into P regions; each rank owns one region and
sums its entries.  The k largest entries of the sum are then sent to all ranks.  The preset "oktopk-paper"
is Algorithm 1 as published.  The preset "oktopk" takes exactly k entries and bounds the volume of every
step.

Terms
-----

============================================  ========================================================
in the paper                                  here
============================================  ========================================================
n, k, density k / n                           ``size``, ``k``, ``density=`` of ``attach``
P workers, worker i                           ``world_size`` ranks, ``rank``
iteration t, from 1                           ``step``, from 0: ``step % period == 0`` opens a period
Topk(sum of Topk(G)) (3.1)                    the total that ``OkTopk.reduce`` returns
Algorithm 1, O(k) sparse allreduce            ``OkTopk.reduce``, after the selector ``Reused``
lines 2-4: local_th, th_re_evaluate           ``Reused``; the threshold is ``ReusedState.threshold_key``
tau' (3.1.3), threshold re-evaluation period  ``threshold_period=``: 32; the paper's BERT: 128
lines 5-7: boundaries, space_repartition      ``OkTopkState.boundaries``, ``boundaries=``
tau (3.1.1), space repartition period         ``repartition_period=``: 64
line 8: split_and_reduce                      ``regions.split_reduce``, phase "split" of the ledger
the worker in charge of a region              the region's owner: rank i owns region i
naive reduce (Figure 7a)                      ``balanced_split=False``
destination rotation (Figure 2b)              ``rotate=``, ``regions.schedule``
bucketing (3.1.1)                             ``buckets=``: 2
lines 9-12: global_th, all_reduced_topk       ``global_threshold="allgather"``
line 13: balance_and_allgatherv               ``regions.balance_and_allgatherv``
data balancing (3.1.2)                        ``balance=``, ``regions.balance_plan``
four times the average (5.3)                  ``balance_trigger=``
direct allgatherv (Figure 7b)                 ``balance=False``
u_t, global top-k values                      ``Reduced.total``
line 14: indexes, the intersection            indices of ``Reduced.delivered``
Algorithm 2, Ok-Topk SGD                      ``sparsync.attach(model, optimizer, "oktopk")`` with SGD
acc, accumulator; epsilon, residuals          accumulated; the residual (``sparsync.feedback.residual``)
1/P of u_t (Algorithm 2, line 7)              the average (``sparsync.feedback.reducer``)
xi, Assumption 1                              ``Monitoring(xi_period=)``, ``sparsync.monitoring.XiProbe``;
                                              for recorded vectors ``assumption_1.xi``
Theorem 4.1                                   ``sparsync.published.sparcml.sgd_bounds.theorem_c_4``
fill-in (section 5.2)                         ``benchmarks/fill_in.md``; presets "allgather", "topkdsa"
quantization, "orthogonal" (section 2)        ``codec=``, a lossy wire format; ``keep_error=``
COO format                                    ``sparsync.wire.Coo``
alpha, beta (per word)                        ``sparsync.cost.machine.Machine``: beta is per byte
Equations 1, 2 and 3                          ``split_cost``, ``gather_cost``, ``equation_3`` in
                                              ``sparsync.published.oktopk.allreduce``
Theorem 3.1, lower bound                      ``sparsync.collectives.costs.lower_bound_words``
Table 1                                       ``table_1.TABLE_1``
Dense, TopkA (Table 1)                        presets "dense" and "allgather"
TopkDSA, gTopk, Gaussiank (Table 1)           presets "topkdsa", "gtopk" and "gaussiank" of
                                              ``sparsync.published.baselines``
DenseOvlp (5.4)                               plain DDP: preset "dense"; a row of ``sparsync simulate``
============================================  ========================================================

Run it
------

With a model in DDP and SGD::

    sync = sparsync.attach(ddp_model, optimizer, "oktopk", density=0.01)

As published, with BERT's period::

    algorithm = sparsync.presets.resolve("oktopk-paper", threshold_period=128)
    sync = sparsync.attach(ddp_model, optimizer, algorithm, density=0.01)

With quantised values, messages shrink to between 0.4 (bfloat16) and 0.2 (QSGD, 2 bits) times the bytes of
COO.  QSGD is unbiased, as in SparCML; its error is discarded and reported
(``stats()["lost_norm"]``)::

    from sparsync.wire import Packed, SparseQsgd

    for options in (
        {"codec": Packed("bf16")},
        {"codec": Packed("int8")},
        {"codec": SparseQsgd(4, scale="max"), "keep_error": False},
        {"codec": SparseQsgd(2, shrink=True)},  # shrinks the values, so the error can be kept
    ):
        quantised = sparsync.presets.resolve("oktopk", **options)

One vector, without a model::

    reduced = sparsync.allreduce(torch.randn(10_000), sparsync.connect(), k=100, algorithm="oktopk")

The following commands use virtual ranks.  They also accept the paper's names, in upper or lower case;
options follow a colon::

    sparsync simulate --algorithm Ok-Topk,oktopk-paper:threshold_period=128 --ranks 8 --model-size 100000
    sparsync bench --collectives TopkA,TopkDSA,gTopk,Gaussiank,Ok-Topk --ranks 8 --size 100000 --steps 4
    sparsync plan --algorithm TopkA,gTopk,Ok-Topk --ranks 8 --model-size 1000000 --network 1gbit,50us

Differs from the paper
----------------------

"oktopk-paper" and "oktopk":

* **P** may be any number of ranks.  The published recursive doubling needs a power of two.  Here, ranks
  form a circulant graph instead, which takes the same number of rounds and words.
* **The residual holds gradients**, not gradients times the learning rate (Algorithm 2, line 4).  A DDP
  hook sees gradients, and the residual stays valid when the learning rate changes.
* **Sums are left folds in the order of the turns**: the owner r of a region adds the shares of r - 1,
  r - 2, ... to its own, whatever arrives first.  So results are bitwise equal on all ranks, in all runs
  and on all transports.
* **The next bucket is sent before the current one has arrived**, so buckets add no latency.  A bucket is
  reduced early only if its owner would otherwise idle, because every reduction reads the running sum once
  more.
* **An allgatherv of uneven counts runs on a ring**, which sends nothing twice.  Dissemination would send
  a large block up to log P times.
* **An overfull rank hands over all of its entries** when entries are balanced.  It gets none of them
  back, because it already knows them.
* **Indices are relative to their region**, so 32 bits suffice for any n.  Every message has a header of
  8 bytes.
* **Values may be rounded** (``codec=``) up to three times: entries on their way to a region's owner, sums
  on their way to all ranks, and sums handed over for balancing.  The rank that rounds keeps the error,
  which must be smaller than the vector.  QSGD's error is not: either discard it with
  ``keep_error=False`` or use ``shrink=True``.  Thresholds are computed from exact sums.

"oktopk" alone:

* **At most k entries** are sent, locally and globally (``cap=1.0``).  A threshold that is 32 steps old
  may select many times k entries, and no bound in terms of k would hold.
* **A floor** (``floor=2 / 3``): a step whose threshold selects fewer than 2 / 3 k entries falls back to
  exact selection.  Early in training, a reused threshold selects only 0.03 to 0.1 k.
* **The global threshold is recomputed on every step** from a histogram
  (``global_threshold="histogram"``), which takes one small allreduce.  The paper allgathers all reduced
  entries every tau' steps: up to 2 min(k P, n) words that its "6k" leaves out.
* **Boundaries are quantiles of the summed counts** (``boundaries="histogram"``).  The paper averages the
  cuts that suit each rank, which assumes that the ranks' supports are alike.
* **Regions are cut again early** (``repartition_trigger=1.5``) if a region held 1.5 times the mean.  If
  the supports suddenly change, the volume then exceeds its bound for one step instead of up to 64.

``threshold_period="auto"`` is an addition: each rank renews its threshold when it selects fewer than
0.89 k or more than 1.11 k entries.

Not here
--------

* Algorithm 2 verbatim, with the learning rate in the residual:
  ``sparsync_papers.baseline_optimizers.UpdateSpaceSGD``, or ``sparsync train --space update``.
* VGG-16 on CIFAR-10, LSTM on AN4 and BERT on Wikipedia: ``sparsync_papers.models`` and
  ``sparsync_papers.workloads``.
* Adam on sparse averages, which the paper uses for BERT.  With Adam, ``attach`` exchanges updates,
  because sparse averages distort Adam's moments (``docs/optimizers.md``).  ``exchange="gradients"``
  overrides this.
* The paper's timings on Piz Daint.  The figures below are counted, simulated, or measured on small
  models.

Figures
-------

* ``docs/results.md``: times on real links, compared with "dense" and this library's "budgeted".
* ``benchmarks/oktopk_volume.md``: words per k for a range of P and inputs.
* ``benchmarks/ablations.md``: rotation, bucketing and both kinds of balancing, each switched off
  separately.
* ``benchmarks/threshold-period.md``: how long a threshold stays accurate.
* ``benchmarks/xi.md``: xi for a range of values and densities.
* ``benchmarks/convergence-sgd.md``: loss after the same number of steps.
* ``benchmarks/reproduced.md``: Table 1 and Figures 4 to 13 next to the paper's numbers, produced by
  ``sparsync reproduce oktopk-table1`` and similar commands.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import Preset
from sparsync.published.oktopk.allreduce import OkTopk, OkTopkState
from sparsync.published.oktopk.presets import oktopk, oktopk_paper
from sparsync.published.oktopk.reuse import Reused, ReusedState

__all__ = ["ROWS", "OkTopk", "OkTopkState", "Reused", "ReusedState", "oktopk", "oktopk_paper"]

_VOLUME = "Ok-Topk, Equations 1 and 2"
_PAPER = "Ok-Topk, Equation 3, if thresholds find k"

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "algorithms": {
            "oktopk": Preset(oktopk, _VOLUME, planned=True, passes_on=OkTopk),
            "oktopk-paper": Preset(oktopk_paper, _PAPER, passes_on=OkTopk),
        },
        "selectors": {"reused": Reused},
        "aliases": {"TopkA": "allgather", "DenseOvlp": "dense", "Ok-Topk SGD": "oktopk"},
    }
)
