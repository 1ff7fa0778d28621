"""Transports carry bytes: the ``Communicator`` seam, its drivers, and its adapters."""
