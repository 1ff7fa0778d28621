"""The baselines of the four papers: gTop-k, Gaussian-k, TopkDSA; D-PSGD, SGP, AD-PSGD, Eager-SGD."""

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

_GAUSSIAN = 1.5  # entries over k under error feedback (benchmarks/selection.md: 0.8 to 1.6)


def _found_by_gaussiank(job: Job) -> tuple[int, Job]:
    return 1, job._replace(k=min(_GAUSSIAN * job.k, job.size))


ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "algorithms": {
            "topkdsa": row("topkdsa", Dynamic, "Ok-Topk, Table 1, TopkDSA", planned=True),
            "gaussiank": row(
                "gaussiank",
                partial(Allgather, cap=2.0),  # the published estimate has no upper end
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
    }
)
