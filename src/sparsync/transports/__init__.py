"""Who carries the bytes: the ``Communicator`` seam and its adapters (torch, sim, a world of one)."""
