"""What happens while training: the log of every step, and the constant xi of Assumption 1."""

from sparsync.monitoring.log import Log, StepSeen
from sparsync.monitoring.monitor import Monitor
from sparsync.monitoring.sinks import Sink, sink_of
from sparsync.monitoring.xi import Measured, XiProbe

__all__ = ["Log", "Measured", "Monitor", "Sink", "StepSeen", "XiProbe", "sink_of"]
