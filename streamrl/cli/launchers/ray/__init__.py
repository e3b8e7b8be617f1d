"""`--ray`: a run on the nodes of a Ray cluster; this process is the driver of its job.

Ray places, watches and ends; trajectories and weights go between the processes as they always do.
"""
