"""A real, slow network on one machine: a namespace per rank, links shaped in both directions.

::

    rank 0: eth0 --(tbf)--> rank0 --+                  tbf shapes what leaves an interface: a rank's
            eth0 <--(tbf)-- rank0 --+-- bridge         own eth0 what it sends, the bridge's end of
    rank 1: eth0 --(tbf)--> rank1 --+                  its link what it receives
            eth0 <--(tbf)-- rank1 --+

Nothing has a name outside: the namespaces are held by the open files of the process that made them
and by the ranks inside, so they vanish with these, however they end.
"""

from sparsync.cli.lab.kernel import LabError, ensure_privileges
from sparsync.cli.lab.lab import (
    Lab,
    LinkTraffic,
    Seat,
    default_burst,
    local_address,
    local_traffic,
    parse_rate,
)

__all__ = [
    "Lab",
    "LabError",
    "LinkTraffic",
    "Seat",
    "default_burst",
    "ensure_privileges",
    "local_address",
    "local_traffic",
    "parse_rate",
]
