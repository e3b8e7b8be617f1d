"""`--ray`: a run on the nodes of a Ray cluster; this process is the driver of its job.

Ray places, watches and ends the processes; trajectories and weights pass between them as in any
run.
"""
