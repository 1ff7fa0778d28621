"""WAGMA-SGD: model averaging in changing groups of ranks, without waiting for late ranks.

Shigang Li, Tal Ben-Nun, Giorgi Nadiradze, Salvatore Di Girolamo, Nikoli Dryden, Dan Alistarh and
Torsten Hoefler, `Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding
Group Averaging <https://doi.org/10.1109/TPDS.2020.3040606>`_, IEEE Transactions on Parallel and
Distributed Systems 32(7), 2021.

Every rank trains its own model.  After each step, it averages its model with a group of about sqrt(P)
ranks; the groups change from step to step.  The first rank to arrive starts the average for all.  A late
rank contributes the last model that it published.  Every tau steps, all ranks wait for each other and
average globally.

Terms
-----

============================================  ========================================================
in the paper                                  here
============================================  ========================================================
P processes                                   ``world_size`` ranks
S, group size, quorum size                    ``group_size=``; default: ``default_group_size(P)``
tau, synchronization period                   ``sync_period=``: 10 as in 5.2 (8 in 5.3 and 5.4)
tau infinite                                  ``sync_period=None``
t, training iteration                         ``step``, from 0, as in the paper
W, local model; W'                            the vector of ``average``: parameters after the local step
U(G, W, t), update rule                       any PyTorch optimizer; momentum stays local
Algorithm 1, dynamic grouping strategy        ``group_of``, in ``sparsync.published.wagma.scheme``
mask, shift, phases of the butterfly          the order of ranks, reshuffled every step:
                                              ``r * stride**-step mod modulus``
G, gradient; b, local batch size              local to the rank's training loop
Algorithm 2, WAGMA-SGD                        ``Wagma``, the scheme "wagma"
wait-avoiding_group_allreduce (line 9)        ``grouping="wait-avoiding"``; ``ModelRounds``, ``Agent``
allreduce within a group                      ``group_allreduce``; with rounding ``coded_allreduce``
sync_allreduce (line 16)                      a global round: ``ModelRounds.members`` are all ranks
stale, line 10                                ``Round.contributed < version``, or a newer round's result
1/S, 1/(S + 1) (lines 11, 13)                 ``Wagma.average``: ``total / models``, or with W' added
collective activation, activator (3.1.1)      ``Agent.arrive``
activation messages, binomial tree            messages of ``Kind.ACTIVATE``, ``tree_children``
version number of a collective                ``round_of(step)``, ``Round.version``
send buffer, passive contribution             the model last handed to the agent (``publish``)
solo, majority collectives (section 6)        ``sparsync.published.baselines.EagerSgd``
alpha, wait-avoiding allreduce (section 4)    ``grouping="wait-avoiding"``
beta, normal group allreduce                  ``grouping="synchronous"``
alpha = beta = false                          ``group_size=1``: local SGD
"similar to AD-PSGD" (section 4)              ``group_size=2, sync_period=None``
"similar to D-PSGD and SGP" (section 4)       ``grouping="synchronous"`` as well
fixed groups (5.2)                            ``dynamic=False``
S = P, "a global collective" (5.2)            ``group_size=`` P
Q1, Q3, Q4, Q5 (section 2)                    ``Averager.averaged``, ``Averager.staleness``,
                                              ``Averager.global_period``,
                                              ``Averager.effective_group_size``
staleness, Assumption 1.3                     no model is older than the last global average;
                                              "largest_staleness" of ``Averager.stats``
Theorems 4.1 and 4.6, Lemma 4.5               ``averaging_bounds``: ``theorem_4_1`` and so on
mu, mean of the models; Gamma, their drift    ``tests/unit/test_wagma.py`` checks Lemma 4.5's bound
straggler, simulated load imbalance (5.2)     ``--delay random:2:0.32``: two ranks per step, 320 ms
runtime of collecting experience (Figure 9)   ``--delay heavytail:1.7:43.5``
fflib schedules, asynchronous execution       a background thread (``sparsync.transports.actors``)
Allreduce-SGD, local SGD                      schemes "allreduce" and "local" of ``sparsync.averaging``
D-PSGD, SGP, AD-PSGD, eager-SGD               ``sparsync.published.baselines``
============================================  ========================================================

Run it
------

With a plain module (not DDP) that starts equal on all ranks, and any optimizer::

    from sparsync.published.wagma import Wagma

    with Wagma(model) as averager:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            averager.step()

The ablations of section 5.2: fixed groups, synchronous groups, local SGD, global groups::

    Wagma(model, dynamic=False).close()
    Wagma(model, grouping="synchronous").close()
    Wagma(model, group_size=1, sync_period=10).close()
    Wagma(model, group_size=torch.distributed.get_world_size()).close()

The next example shows a straggler on virtual ranks: on every step, a different one of the eight ranks
takes four times as long.  With an allreduce, each of the 40 steps takes as long as its slowest rank, 16.0
seconds in total.  With WAGMA, the other ranks continue without the late one, and training takes 6.4
seconds.  If no rank ever waited, it would take 5.5 seconds::

    from sparsync.averaging import LocalSgd

    def train(make):
        async def program(comm):
            averager, model = make(), torch.zeros(1_000)
            await averager.begin(comm, model, 0)
            for step in range(40):
                await comm.compute(0.4 if step % 8 == comm.rank else 0.1)
                model = await averager.average(comm, model + comm.rank, step)
            return comm.now, averager.participation

        return max(seconds for seconds, _ in sparsync.simulate(program, world_size=8).results)

    print(f"{train(lambda: LocalSgd(period=1)):.1f}, {train(lambda: Wagma(sync_period=10)):.1f}")

The price is lost updates.  Even a model that is only slightly late is stale, and undoes part of its
group's progress.  If the steps of eight ranks vary by 1 %, only 65 % of the updates have an effect on the
mean of all models (``benchmarks/averaging-convergence.md``).  With ``grouping="synchronous"``, all have.

The following commands train on local processes, most of them with late ranks.  Each prints a table with
the mean time per step; its caption says how long ranks waited and how many models were stale.  In your
own training, ``Averager.stats`` returns these numbers::

    sparsync train --algorithm Allreduce-SGD,WAGMA-SGD --ranks 2 --steps 8 --delay random:1:0.05
    sparsync train --algorithm wagma:group_size=2,sync_period=none,wagma:dynamic=false --ranks 2 --steps 8
    sparsync train --algorithm wagma --ranks 2 --steps 8 --delay persistent:1:0.05
    sparsync train --algorithm wagma --ranks 2 --steps 8 --delay heavytail:0.01:0.5

``--delay random:COUNT:SECONDS`` delays COUNT random ranks on every step, and ``persistent:RANK:SECONDS``
always delays the same rank.  ``heavytail:MIN:MAX`` delays every rank on every step, usually briefly.

Table I, for every scheme here
------------------------------

All schemes are decentralized: no rank is a server.  The staleness is the age of the models or updates in
an average.  "never" means that only ``finish`` averages over all ranks.

===================  ========  ==============  ==========  ===============  ==========================
scheme               averages  S               staleness   global average   in the paper's Table I
===================  ========  ==============  ==========  ===============  ==========================
"allreduce"          models    P               none        every step       the same, of gradients
"local"              models    1               none        every 8 steps    S = O(1), bounded: by tau
"wagma"              models    sqrt(P)         bounded     every 10 steps   the same
"dpsgd"              models    3               none        never            the same: S = O(1)
"sgp"                models    2               none        never            the same: S = O(1)
"adpsgd"             models    2               unbounded   never            the same: S = O(1)
"eager-solo"         updates   P               unbounded   every step       bounded, of gradients
"eager-majority"     updates   P               unbounded   every step       bounded, of gradients
"bmuf"               updates   1               none        every 8 steps    S = P, none, of models
"qsparse-local"      updates   1               none        every 8 steps    centralized, bounded,
                                                                            of gradients
"diloco"             updates   1               none        every 500 steps  -
"streaming-diloco"   updates   1               bounded     every 100 steps  -
"muloco"             updates   1               none        every 30 steps   -
"sparseloco"         updates   1               none        every 30 steps   -
"demo"               updates   P               none        every step       -
"updates"            updates   1               none        every 2 steps    -
===================  ========  ==============  ==========  ===============  ==========================

* "allreduce" averages models after the local step, which for SGD is equivalent to averaging gradients.
* "local": the paper counts a local step as stale until all ranks have it, as Assumption 1.3 does.  Its
  BMUF has the same local steps but is listed as "none".
* "eager-solo" and "eager-majority": the paper's Eager-SGD bounds staleness by synchronising the replicas
  periodically.  This implementation needs no such synchronisation, because a late rank applies all sums
  that it has missed.  In return, a rank may be late by any number of steps.
* "sgp" with ``neighbours=2`` has S = 3.

Differs from the paper
----------------------

* **P and S** may be any numbers, because in many jobs the number of ranks is not a power of two.  If S
  does not divide P, group sizes differ by one.  Such groups end at different times, and models become
  stale.
  For powers of two, the groups are the same as in Algorithm 1, read as ``mask = 1 << shift``.  As
  printed, Algorithm 1 shifts a mask that is already shifted, which does not reproduce the paper's own
  examples.
* **A late rank keeps its model if there is no newer result**, because a result that is used twice would
  count twice.  A rank that is late by several averages publishes its model once and uses only the newest
  result, whereas Algorithm 2 has one average per step.
* **A group's sum** uses recursive doubling or reduce-scatter plus allgather, whichever is cheaper at 50
  us per message and 1 Gbit/s.  The paper's butterfly is the former.
* **Activation** uses a binomial tree whose root is the activator.  Unlike the exclusive or in Figure 1,
  this works for any P.  Data that arrive before the activation message also activate a rank.
* **Before its first step**, a rank contributes its initial model; the paper does not specify this.  If a
  rank is late after a global average, it contributes the model that it gave to that average, like
  Algorithm 2's send buffer.
* **All averages**, including global ones, run on the agent's thread and in host memory.
* **Groups of one** (``group_size=1``) have no agent that contributes for a late rank, because the rank
  would then average its new model with its old one.  The result is local SGD, as section 4 says.
* **Tensors that are not trained** have rules (``buffers=``, ``moments=``): BatchNorm statistics are
  averaged with the parameters or stay local; optimizer moments stay local by default.
* **A final global average** is taken by ``finish``, so that training ends with one model.

Additions, off by default:

* ``values="bf16"`` or ``"int8"``: group averages are rounded, and the error is contributed later.
* ``deadline=``: a rank that is silent for this long is left out, and rejoins when it sends a message
  again.  Without a deadline, as published, the others wait for it.

Not here
--------

* The proof of convergence (section 4.1).  ``tests/claims/test_wagma_family.py`` checks the mixing
  matrices of the family in section 4 instead.
* ResNet-50 on ImageNet and the Transformer on WMT17: ``sparsync_papers.models`` and
  ``sparsync_papers.workloads``.  Habitat's navigation is replaced by PPO on CartPole
  (``sparsync_papers.workloads.ppo``).
* Averaging gradients instead of models: ``sparsync.attach``.
* Agents over MPI: agents always open their own ZeroMQ connections, whatever transport the job uses.
* Measured throughput on Piz Daint: it is simulated with that machine's compute and network times.

Figures
-------

* ``benchmarks/averaging-throughput.md``: Figures 4, 7 and 10, in virtual time.
* ``benchmarks/averaging-convergence.md``: loss of all schemes after the same number of steps, with late
  ranks.
* ``benchmarks/averaging-ablations.md``: section 5.2's ablations on 64 ranks.  ``sparsync reproduce
  wagma-ablations`` repeats the ablations of sections 5.2 and 5.3 with smaller models.
* ``benchmarks/averaging-delays.md``: the seconds that delays add, measured on real processes.
* ``benchmarks/ppo.md``: small-scale reinforcement learning (section 5.4).
* ``benchmarks/reproduced.md``: Figures 4 to 8, 10 and 11 next to the paper's numbers, produced by
  ``sparsync reproduce wagma-fig4`` and similar commands.
* ``docs/averaging.md``: message contents, consistency checks, saving and resuming.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sparsync.published.wagma.scheme import Wagma

__all__ = ["ROWS", "Wagma"]

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"schemes": {"wagma": Wagma}, "aliases": {"WAGMA-SGD": "wagma"}}
)
