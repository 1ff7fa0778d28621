"""The simulator: virtual ranks on a virtual network run the real algorithms, deterministically."""

from sparsync.transports.sim.network import Fault, Port, Usage, Weight
from sparsync.transports.sim.topology import Links, Ports, Route, Topology, TwoLevel
from sparsync.transports.sim.virtual_rank import Prices, SimCommunicator, Simulation, simulate

__all__ = [
    "Fault",
    "Links",
    "Port",
    "Ports",
    "Prices",
    "Route",
    "SimCommunicator",
    "Simulation",
    "Topology",
    "TwoLevel",
    "Usage",
    "Weight",
    "simulate",
]
