"""Where a step's time goes: its phases, its floating-point operations, and traces of it."""
