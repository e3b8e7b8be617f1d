"""Trajectories as tensors: the batch of a step, its micro-batches, and which of them share one."""
