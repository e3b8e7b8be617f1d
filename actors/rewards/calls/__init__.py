"""How a reward is called: its limits, in threads, in processes of its own, and what it prints."""
