"""ZeroMQ with framed messages, any-source receive and encryption; see ``ZmqCommunicator``."""

from sparsync.transports.zmq.communicator import ZmqCommunicator, host_over
from sparsync.transports.zmq.curve import make_curve_keys

__all__ = ["ZmqCommunicator", "host_over", "make_curve_keys"]
