"""The buffer of trajectory groups: the ledger and its backends.

The ledger decides which leases are granted and batches taken; a backend (`buffers.memory`, `zmq://`,
`redis://`) serves it to other processes and machines. Nothing here imports torch.
"""
