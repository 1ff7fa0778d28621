"""Training steps on virtual ranks: what they take, and what of it is communication."""

from sparsync.bench.simulation.settings import SimulationSettings
from sparsync.bench.simulation.training import SimulatedRow, SimulatedStep, simulate_training

__all__ = ["SimulatedRow", "SimulatedStep", "SimulationSettings", "simulate_training"]
