"""What runs on a host: the agent, which starts the host's processes and ends with the launcher."""
