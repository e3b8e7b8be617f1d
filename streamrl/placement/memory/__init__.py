"""How much memory the processes of a plan need on their GPUs, before anything runs."""
