"""List the artifacts of all modules, and what cannot be reproduced."""

from __future__ import annotations

from sparsync_papers.reproduce import (
    Artifact,
    Unavailable,
    oktopk_balance,
    oktopk_convergence,
    oktopk_scaling,
    oktopk_selection,
    oktopk_table1,
    redsync_model,
    redsync_selection,
    redsync_training,
    sparcml_fill_in,
    sparcml_linear,
    sparcml_reduction,
    sparcml_training,
    wagma_imbalance,
    wagma_throughput,
    wagma_training,
)

_MODULES = (
    sparcml_fill_in,
    sparcml_reduction,
    sparcml_training,
    sparcml_linear,
    redsync_selection,
    redsync_model,
    redsync_training,
    oktopk_table1,
    oktopk_selection,
    oktopk_balance,
    oktopk_scaling,
    oktopk_convergence,
    wagma_throughput,
    wagma_training,
    wagma_imbalance,
)
ARTIFACTS: tuple[Artifact, ...] = tuple(
    thing for module in _MODULES for thing in vars(module).values() if isinstance(thing, Artifact)
)

UNAVAILABLE: tuple[Unavailable, ...] = (
    Unavailable(
        "speedups of Figures 4 to 6 and of ImageNet in hours and days",
        "SparCML",
        "they are times of 8 to 128 GPUs; the accuracies are compared on small models",
    ),
    Unavailable(
        "Figure 6b, scaling of speech training",
        "SparCML",
        "model and 30,000 hours of speech are not public, and it needs 32 to 128 GPUs",
    ),
    Unavailable(
        "Table 2, Webspam and 32 nodes; the comparison with Spark",
        "SparCML",
        "the data sets are not at hand (sparsync linear trains on them: --data FILE); no Spark",
    ),
    Unavailable(
        "Table 1, ImageNet and Wiki2 rows; Figure 6, ResNet-50",
        "RedSync",
        "days of training on several GPUs, and data that must be downloaded",
    ),
    Unavailable(
        "Figures 7 to 9, measured",
        "RedSync",
        "they need 8 GPUs in a server and 128 on Piz Daint; the paper's cost model stands in",
    ),
    Unavailable(
        "Figure 5",
        "RedSync",
        "MPI and NCCL on their machines; its two peaks are given to the cost model",
    ),
    Unavailable(
        "Figure 9",
        "WAGMA",
        "Habitat is out of reach; the heavy tail of wagma-fig10 is made of the text's three figures",
    ),
    Unavailable(
        "ablations of section 5.2",
        "WAGMA",
        "they need several seeds: benchmarks/averaging_ablations.py in a clone, two hours",
    ),
    Unavailable(
        "Figures 5, 8 and 11 at their size",
        "WAGMA",
        "ImageNet, WMT17 and Habitat for days on 16 to 64 GPUs; small models and tasks stand in",
    ),
)
