"""``sparsync simulate``: training steps on virtual ranks, and the part of them that is communication."""

from sparsync.cli.simulate.settings import SimulationSettings
from sparsync.cli.simulate.training import SimulatedRow, SimulatedStep, simulate_training

__all__ = ["SimulatedRow", "SimulatedStep", "SimulationSettings", "simulate_training"]
