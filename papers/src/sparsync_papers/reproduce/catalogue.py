"""All artifacts, and the tables and figures that cannot be reproduced."""

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
        "Figure 2; Tables 1 and 3",
        "SparCML",
        "a diagram, data sets and hyperparameters, not results: the room sparsync.published.sparcml "
        "has the collectives and SPARCML_SETTINGS, docs/data.md the data sets",
    ),
    Unavailable(
        "speedups of Figures 4 to 6 and of ImageNet in hours and days",
        "SparCML",
        "they are times of 8 to 128 GPUs; the accuracies are compared on small models",
    ),
    Unavailable(
        "Figure 6b, scaling of speech training",
        "SparCML",
        "model and 30,000 hours of speech are not public, and training needs 32 to 128 GPUs",
    ),
    Unavailable(
        "Table 2, Webspam; the comparison with Spark",
        "SparCML",
        "the data sets must be downloaded (sparsync linear trains on them: --data FILE); Spark is "
        "not run",
    ),
    Unavailable(
        "Figures 1, 2, 4 and 11",
        "RedSync",
        "diagrams of systems, overlap and messages, without results: the room "
        "sparsync.published.redsync has what they show",
    ),
    Unavailable(
        "Table 1, ImageNet and Wiki2 rows; Figure 6, ResNet-50",
        "RedSync",
        "days of training on several GPUs, and data that must be downloaded",
    ),
    Unavailable(
        "Tables 1 and 2, ResNet-44 rows",
        "RedSync",
        "full trainings on CIFAR-10, which must be downloaded: sparsync train --workload "
        "resnet44-cifar10 --data FOLDER trains it; a small VGG and an LSTM stand in",
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
        "AdaComp's bins and Strom's threshold",
        "RedSync",
        "related work that no table or figure of the paper compares with; AdaComp also selects by "
        "the newest gradient, which a selector here cannot separate from the residual",
    ),
    Unavailable(
        "Figures 1 to 3; Table 2",
        "Ok-Topk",
        "diagrams of the algorithm and a list of models, without results: the room "
        "sparsync.published.oktopk has the phases, docs/models.md the models",
    ),
    Unavailable(
        "Figures 4 to 6, 9, 11 and 13 at their size",
        "Ok-Topk",
        "160 epochs of CIFAR-10 and AN4 and 400,000 steps of BERT on up to 32 GPU nodes; small models of "
        "the same three kinds stand in, an LSTM among them",
    ),
    Unavailable(
        "Figures 1 to 3; Table I",
        "WAGMA",
        "diagrams of the algorithm and a classification, without results: the room "
        "sparsync.published.wagma has Table I for every scheme",
    ),
    Unavailable(
        "Figure 9",
        "WAGMA",
        "Habitat is out of reach; the heavy tail of wagma-fig10 is made of the text's three figures",
    ),
    Unavailable(
        "Figures 5, 8 and 11 at their size",
        "WAGMA",
        "ImageNet, WMT17 and Habitat for days on 16 to 64 GPUs; small models and tasks stand in",
    ),
)
