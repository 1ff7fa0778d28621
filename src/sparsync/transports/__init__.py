"""Transports: how bytes reach other ranks; the ``Communicator`` interface, its drivers and adapters."""
