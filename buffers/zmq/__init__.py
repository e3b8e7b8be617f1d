"""`zmq://`: the buffer daemon's server, and its client."""
