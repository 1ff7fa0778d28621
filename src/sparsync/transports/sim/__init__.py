"""Virtual ranks on a virtual network: the same algorithm code, deterministic and cheap."""

from sparsync.transports.sim.communicator import Prices, SimCommunicator, Simulation, simulate
from sparsync.transports.sim.network import Fault, Port, Usage, Weight
from sparsync.transports.sim.topology import Links, Ports, Route, Topology, TwoLevel

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
