"""Where trajectory groups wait: the ledger and its backends.

The ledger decides; a backend (`memory://`, `zmq://`, `redis://`) carries its decisions over
threads, processes and machines. Nothing here imports torch.
"""
