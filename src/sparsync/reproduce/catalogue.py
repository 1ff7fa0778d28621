"""What can be reproduced, and what cannot: a new artifact is one file and one row here."""

from __future__ import annotations

from sparsync.reproduce import (
    oktopk_balance,
    oktopk_convergence,
    oktopk_scaling,
    oktopk_selection,
    oktopk_table1,
    oktopk_xi,
    redsync_selection,
    redsync_shares,
    redsync_speed,
    redsync_training,
    sparcml_fill_in,
    sparcml_linear,
    sparcml_reduction,
    sparcml_training,
    wagma_convergence,
    wagma_imbalance,
    wagma_navigation,
    wagma_speed,
)
from sparsync.reproduce.base import Artifact, Unavailable

__all__ = ["ARTIFACTS", "UNAVAILABLE"]

ARTIFACTS: tuple[Artifact, ...] = (
    sparcml_fill_in.FIGURE_1,
    sparcml_reduction.FIGURE_3,
    sparcml_training.FIGURE_4,
    sparcml_training.FIGURE_5,
    sparcml_training.FIGURE_6,
    sparcml_fill_in.FIGURE_7,
    sparcml_linear.TABLE_2,
    sparcml_linear.SCD,
    redsync_selection.FIGURE_3,
    redsync_shares.FIGURE_5,
    redsync_training.FIGURE_6_TABLE_1,
    redsync_speed.FIGURE_7,
    redsync_speed.FIGURES_8_9,
    redsync_shares.FIGURE_10,
    redsync_training.TABLE_2,
    oktopk_table1.TABLE_1,
    oktopk_selection.FIGURE_4,
    oktopk_xi.FIGURE_5,
    oktopk_selection.FIGURE_6,
    oktopk_balance.FIGURE_7,
    oktopk_scaling.FIGURE_8,
    oktopk_convergence.FIGURE_9,
    oktopk_scaling.FIGURE_10,
    oktopk_convergence.FIGURE_11,
    oktopk_scaling.FIGURE_12,
    oktopk_convergence.FIGURE_13,
    oktopk_xi.FILL_IN,
    wagma_speed.FIGURE_4,
    wagma_speed.CONTROL,
    wagma_convergence.FIGURE_5,
    wagma_convergence.ABLATIONS,
    wagma_imbalance.FIGURE_6,
    wagma_speed.FIGURE_7,
    wagma_convergence.FIGURE_8,
    wagma_imbalance.FIGURE_9,
    wagma_speed.FIGURE_10,
    wagma_navigation.FIGURE_11,
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
        "Figures 5, 8 and 11 at their size",
        "WAGMA",
        "ImageNet, WMT17 and Habitat for days on 16 to 64 GPUs; small models and tasks stand in",
    ),
)
