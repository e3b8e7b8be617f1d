"""`--slurm`: a run on the nodes of a job of Slurm, which Slurm has found."""
