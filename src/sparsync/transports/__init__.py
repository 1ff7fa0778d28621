"""Transports carry bytes: the ``Communicator`` seam, the drivers of algorithms, and the adapters."""
