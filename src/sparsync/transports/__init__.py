"""Transports carry bytes; here are the ``Communicator`` seam, drivers of algorithms, and adapters."""
