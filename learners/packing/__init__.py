"""Which of a step's trajectories share a micro-batch."""
