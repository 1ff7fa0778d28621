"""``sparsync simulate``: training steps on virtual ranks, and how much of them is communication."""

from sparsync.cli.simulate.settings import SimulationSettings
from sparsync.cli.simulate.training import SimulatedRow, SimulatedStep, simulate_training

__all__ = ["SimulatedRow", "SimulatedStep", "SimulationSettings", "simulate_training"]
