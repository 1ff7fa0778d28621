"""Who carries the bytes: the ``Communicator`` seam, its adapters (torch, zmq, sim, a world of one)."""
