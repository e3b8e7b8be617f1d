"""`streamrl top`: the live view of a run in a terminal, and the same once, as text or JSON."""
