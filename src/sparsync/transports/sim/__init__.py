"""Virtual ranks on a virtual network: the same algorithm code, deterministic and cheap."""

from sparsync.transports.sim.communicator import SimCommunicator, Simulation, simulate
from sparsync.transports.sim.network import Fault, Links

__all__ = ["Fault", "Links", "SimCommunicator", "Simulation", "simulate"]
