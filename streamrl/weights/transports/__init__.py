"""How a version's bytes move: broadcast, shared memory, files."""
