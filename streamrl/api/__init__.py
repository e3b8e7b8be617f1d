"""Runs from Python: `streamrl.train` starts the daemons that `streamrl launch` starts.

    import streamrl

    run = streamrl.train("config.yaml", reward=score, dataset=rows)
    print(run.metrics()[-1]["reward/mean"], run.checkpoint)

Invariant: the run is that of the command line, in processes of its own: its folder, its
configuration file and its exit codes are the same, and every command works on it.
"""

from streamrl.api.run import Run
from streamrl.api.start import train

__all__ = ["Run", "train"]
