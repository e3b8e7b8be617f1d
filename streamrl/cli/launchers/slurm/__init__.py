"""`--slurm`: a run as a job of Slurm; Slurm finds the nodes, ours is the plan on them."""
