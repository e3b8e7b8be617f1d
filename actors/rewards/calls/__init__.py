"""How a reward is called: in threads or in separate processes, its limits, and what it may
print."""
