"""WAGMA-SGD: average models in changing groups of ranks, without waiting for late ones.

Shigang Li, Tal Ben-Nun, Giorgi Nadiradze, Salvatore Di Girolamo, Nikoli Dryden, Dan Alistarh and
Torsten Hoefler, `Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding
Group Averaging <https://doi.org/10.1109/TPDS.2020.3040606>`_, IEEE Transactions on Parallel and
Distributed Systems 32(7), 2021.

Every rank trains a model of its own.  After each step it averages with a group of about sqrt(P) ranks,
which changes from step to step.  The first rank to arrive starts the average for all, and a late rank
takes part with the last model that it published.  Every tau steps all ranks average, and wait for each
other.

Terms
-----

============================================  ========================================================
in the paper                                  here
============================================  ========================================================
P processes                                   ``world_size`` ranks
S, group size                                 ``group_size=``; default: ``default_group_size(P)``
tau, synchronization period                   ``sync_period=``: 10
t, training iteration                         ``step``, from 0, as in the paper
W, local model; W'                            the vector of ``average``: parameters after the local step
U(G, W, t), update rule                       any optimizer of torch; momentum is the rank's own
Algorithm 1, dynamic grouping strategy        ``group_of``, in ``sparsync.published.wagma.scheme``
mask, shift, phases of the butterfly          the row's shuffle: ``r * stride**-step mod modulus``
Algorithm 2, WAGMA-SGD                        ``Wagma``, the scheme "wagma"
wait-avoiding_group_allreduce (line 9)        ``grouping="wait-avoiding"``; ``ModelRounds``, ``Agent``
sync_allreduce (line 16)                      a global round: ``ModelRounds.synchronous``
stale, line 10                                ``Round.contributed < version``
1/S, 1/(S + 1) (lines 11, 13)                 ``Wagma.average``: ``total / models``, or with W' once more
collective activation, activator (3.1.1)      ``Agent.arrive``
activation messages, binomial tree            messages of ``Kind.ACTIVATE``, ``tree_children``
version number of a collective                ``round_of(step)``, ``Round.version``
send buffer, passive contribution             the model that an agent was last handed (``publish``)
solo, majority collectives (section 6)        ``sparsync.published.baselines.EagerSgd``
alpha, wait-avoiding allreduce (section 4)    ``grouping="wait-avoiding"``
beta, normal group allreduce                  ``grouping="synchronous"``
alpha = beta = false                          ``group_size=1``: local SGD
fixed groups (5.2)                            ``dynamic=False``
staleness bound                               no model is older than the last global average
Theorems 4.1 and 4.6, Lemma 4.5               ``averaging_bounds``: ``theorem_4_1`` and so on
fflib schedules, asynchronous execution       a thread next to training (``sparsync.transports.actors``)
Allreduce-SGD, local SGD                      schemes "allreduce" and "local" of ``sparsync.averaging``
D-PSGD, SGP, AD-PSGD, eager-SGD               ``sparsync.published.baselines``
============================================  ========================================================

Run it
------

With a plain module (not DDP), equal on all ranks, and any optimizer::

    from sparsync.published.wagma import Wagma

    with Wagma(model) as averager:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            averager.step()

The ablations of section 5.2: fixed groups, synchronous groups, local SGD::

    Wagma(model, dynamic=False).close()
    Wagma(model, grouping="synchronous").close()
    Wagma(model, group_size=1, sync_period=10).close()

On processes of this machine, of which one is late on every step::

    sparsync train --algorithm allreduce,wagma --ranks 2 --steps 8 --delay random:1:0.05

Differs from the paper
----------------------

* **P and S** are any numbers; groups that S does not divide evenly differ by one rank.  With powers of
  two the groups are those of Algorithm 1, read as ``mask = 1 << shift``: as printed, a mask that is
  already shifted is shifted again, and the paper's own examples do not come out.
* **A late rank that finds no newer result keeps its model**, and takes each result once.  A rank that
  is late by several averages publishes once and takes the newest.
* **A group's sum** is by recursive doubling or by reduce-scatter and allgather, whichever is cheaper.
* **Tensors that do not train** have rules (``buffers=``, ``moments=``): BatchNorm's statistics are
  averaged with the parameters, or stay local; an optimizer's moments stay local by default.
* **A last global average** is taken by ``finish``, so that training ends with one model.

Additions, off by default:

* ``values="bf16"`` or ``"int8"``: group averages are rounded, and the error is contributed later.
* ``deadline=``: a rank that is silent for this long is left out, and goes on with the others when it is
  heard again.  As published, it is waited for.

Not here
--------

* The proof of convergence (section 4.1).  ``tests/claims/test_wagma_family.py`` has the mixing matrices
  of section 4's family instead.
* ResNet-50 on ImageNet and the Transformer on WMT17: ``sparsync_papers.models`` and
  ``sparsync_papers.workloads``.  Habitat's navigation is replaced by PPO on CartPole
  (``sparsync_papers.workloads.ppo``).
* Averages of gradients in place of models: ``sparsync.attach``.
* Agents over MPI: they have ZeroMQ's connections of their own, whatever carries the rest.
* The paper's throughput on Piz Daint: here it is simulated, with its compute and network.

Figures
-------

* ``benchmarks/averaging-throughput.md``: Figures 4, 7 and 10, in virtual time.
* ``benchmarks/averaging-convergence.md``: loss of all schemes after equal steps, with late ranks.
* ``benchmarks/averaging-ablations.md``: section 5.2's ablations on 64 ranks.
* ``benchmarks/averaging-delays.md``: seconds that delays add, with real processes.
* ``benchmarks/ppo.md``: reinforcement learning (section 5.4), small.
* ``benchmarks/reproduced.md``: Figures 4 to 8, 10 and 11 next to the paper's numbers, by ``sparsync
  reproduce wagma-fig4`` and so on.
* ``docs/averaging.md``: what travels, what is checked, saving and resuming.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sparsync.published.wagma.scheme import Wagma

__all__ = ["ROWS", "Wagma"]

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"schemes": {"wagma": Wagma}, "aliases": {"WAGMA-SGD": "wagma"}}
)
