"""The papers' baselines: sparse allreduces, gossip, and partial collectives.

* TopkDSA: SparCML's dynamic allreduce, as listed in Ok-Topk's Table 1 (``sparsync.published.sparcml``).
* Gaussiank: Shaohuai Shi, Xiaowen Chu, Ka Chun Cheung and Simon See, `Understanding Top-k
  Sparsification in Distributed Deep Learning <https://arxiv.org/abs/1911.08772>`_, 2019.
* gTopk: Shaohuai Shi, Qiang Wang, Kaiyong Zhao, Zhenheng Tang, Yuxin Wang, Xiang Huang and Xiaowen Chu,
  `A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks
  <https://arxiv.org/abs/1901.04359>`_, ICDCS 2019.
* D-PSGD: Xiangru Lian, Ce Zhang, Huan Zhang, Cho-Jui Hsieh, Wei Zhang and Ji Liu, `Can Decentralized
  Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel Stochastic
  Gradient Descent <https://arxiv.org/abs/1705.09056>`_, NIPS 2017.
* SGP: Mahmoud Assran, Nicolas Loizou, Nicolas Ballas and Michael Rabbat, `Stochastic Gradient Push for
  Distributed Deep Learning <https://arxiv.org/abs/1811.10792>`_, ICML 2019.
* AD-PSGD: Xiangru Lian, Wei Zhang, Ce Zhang and Ji Liu, `Asynchronous Decentralized Parallel Stochastic
  Gradient Descent <https://arxiv.org/abs/1710.06952>`_, ICML 2018.
* Eager-SGD: Shigang Li, Tal Ben-Nun, Salvatore Di Girolamo, Dan Alistarh and Torsten Hoefler, `Taming
  Unbalanced Training Workloads in Deep Learning with Partial Collective Operations
  <https://arxiv.org/abs/1908.04207>`_, PPoPP 2020.

The first three are presets that exchange sparse gradients.  The others are schemes that average models.

Terms
-----

============================================  ========================================================
in the papers                                 here
============================================  ========================================================
TopkA (Ok-Topk, Table 1)                      preset "allgather": ``sparsync.collectives.Allgather``
TopkDSA (Ok-Topk, Table 1)                    preset "topkdsa": ``sparsync.published.sparcml.Dynamic``
Gaussiank, Gaussian-k                         ``GaussianK``, a selector; preset "gaussiank"
"more than 3k/4" (Ok-Topk, section 5.4)       ``GaussianK(enough=)``
gTopk, gTop-k                                 ``GTopk``, preset "gtopk"
reduction tree, broadcast tree                phases "reduce" and "broadcast" of the ledger
Dense, Allreduce-SGD                          preset "dense"; scheme "allreduce"
local SGD, H                                  scheme "local": ``sparsync.averaging.LocalSgd``, ``period=``
D-PSGD                                        ``Dpsgd``, scheme "dpsgd"
ring topology, two neighbours                 ``Ring`` of ``sparsync.published.baselines.gossip``
communication steps per iteration             ``mixing_steps=``
SGP, PushSum, w, x, z                         ``Sgp``, scheme "sgp"; ``SgpState.weight``
directed exponential graph                    ``Exponential``
communication neighbours, "SGP (2n)"          ``neighbours=``
AD-PSGD, communication thread                 the agent of ``AdPsgd``, scheme "adpsgd"
Eager-SGD, partial allreduce                  ``EagerSgd``
solo allreduce                                ``quorum="solo"``, scheme "eager-solo"
majority allreduce                            ``quorum="majority"``, scheme "eager-majority"
============================================  ========================================================

Run it
------

A preset, with DDP and SGD::

    sync = sparsync.attach(ddp_model, optimizer, "gtopk", density=0.01)

A scheme, with a plain module (not DDP) and any optimizer::

    from sparsync.published.baselines import Sgp

    with Sgp(model, neighbours=2) as averager:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            averager.step()

The first command uses virtual ranks, the others local processes; in the second, one rank is late on every
step.  The papers' names work in upper or lower case ("Eager-SGD" is "eager-majority"); options follow a
colon::

    sparsync bench --collectives TopkA,TopkDSA,Gaussiank,gTopk --ranks 8 --size 100000 --steps 2
    sparsync train --algorithm D-PSGD:mixing_steps=2,SGP,AD-PSGD --ranks 2 --steps 8 --delay random:1:0.05
    sparsync train --algorithm local-SGD:period=4,Eager-SGD,eager-solo --ranks 2 --steps 8

Differs from the papers
-----------------------

* **Gaussian-k**: the threshold is lowered at most 32 times, by a tenth each time; after that, the k
  largest entries are selected.  The estimate uses the absolute value of the mean; mean and deviation are
  computed from the finite elements, in float64.  In the preset, a rank sends at most 2 k entries
  (``cap=2.0``), because nothing else bounds their number.  ``cap=None`` is as published.
* **gTop-k**: P may be any number of ranks.  If a rank drops entries of a sum on the way up the tree, the
  entries stay in this rank's residual, so nothing is lost or counted twice.
* **TopkDSA**: see ``sparsync.published.sparcml``.
* **D-PSGD** averages after the local step; the paper allows either order.
* **SGP** does not overlap communication with computation.
* **AD-PSGD**: any rank may contact any other, because agents answer immediately and cannot deadlock.  The
  paper splits the ranks into two halves to avoid deadlock.  A rank starts one exchange per step, whereas
  the paper starts as many as possible.
* **Eager-SGD** sums the updates of the ranks' optimizers instead of gradients; for SGD, the result is the
  same.  A late rank applies all sums that it has missed, so replicas need no periodic synchronisation.
  Updates that are not in a sum yet stay in the rank's own weights.  Otherwise, training would diverge
  when ranks fall far behind.

Not here
--------

* Allgather, dense allreduce and local SGD: they belong to the library's core, ``sparsync.collectives``
  and ``sparsync.averaging``.
* BMUF, Qsparse-local-SGD, DiLoCo and other schemes that exchange after several local steps: see
  ``sparsync.updates``.
* fp16 and PowerSGD: ``sparsync train --algorithm fp16,powersgd`` uses PyTorch's own hooks.
* SparDL: for a volume of O(k) in O(log P) rounds, this library has ``sparsync.collectives.Halving``.

Figures
-------

* ``benchmarks/averaging-throughput.md``, ``benchmarks/averaging-convergence.md``: comparisons of these
  schemes with WAGMA.
* ``benchmarks/selection.md``: time of the selectors.
* ``benchmarks/reproduced.md``: Ok-Topk's Table 1 and Figure 6, produced by ``sparsync reproduce
  oktopk-table1`` and ``sparsync reproduce oktopk-fig6``.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import row
from sparsync.collectives import Allgather
from sparsync.collectives.costs import Job
from sparsync.published.baselines.eager import EagerSgd
from sparsync.published.baselines.gaussiank import GaussianK
from sparsync.published.baselines.gossip import AdPsgd, Dpsgd, Sgp
from sparsync.published.baselines.gtopk import GTopk
from sparsync.published.sparcml.collectives import Dynamic

__all__ = ["ROWS", "AdPsgd", "Dpsgd", "EagerSgd", "GTopk", "GaussianK", "Sgp"]

# number of entries selected under error feedback, in units of k (0.8 to 1.6 in benchmarks/selection.md)
_GAUSSIAN = 1.5


def _found_by_gaussiank(job: Job) -> tuple[int, Job]:
    return 1, job._replace(k=min(_GAUSSIAN * job.k, job.size))


ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "algorithms": {
            "topkdsa": row("topkdsa", Dynamic, "Ok-Topk, Table 1, TopkDSA", planned=True),
            "gaussiank": row(
                "gaussiank",
                partial(Allgather, cap=2.0),  # the published estimate has no upper bound
                "Ok-Topk, Table 1, Gaussiank",
                selector=GaussianK,
                calls=_found_by_gaussiank,
            ),
            "gtopk": row("gtopk", GTopk, "Ok-Topk, Table 1, gTopk"),
        },
        "schemes": {
            "dpsgd": Dpsgd,
            "sgp": Sgp,
            "adpsgd": AdPsgd,
            "eager-solo": partial(EagerSgd, quorum="solo"),
            "eager-majority": partial(EagerSgd, quorum="majority"),
        },
        "selectors": {"gaussian": GaussianK},
        "aliases": {
            "Allreduce-SGD": "allreduce",
            "Local SGD": "local",
            # WAGMA-SGD, section 2.2, describes this quorum: "at most half"
            "Eager-SGD": "eager-majority",
        },
    }
)
