"""What runs where: hosts and their devices, and the plan of a run's processes."""
