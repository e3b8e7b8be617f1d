"""The batch script of a run.

The script becomes the launcher, so that the signal before the time limit reaches it. The first
start of a job is what its submission asked for, and goes on where another job has made a step
meanwhile; every other start goes on, though the first one may have ended before a step.

Invariant: the same configuration and options give the same script.
"""

import hashlib
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from streamrl.cli.processes.command import executable
from streamrl.config import RunConfig, to_yaml
from streamrl.errors import ConfigError

# Before the time limit, in seconds, so that the learner can save.
STOP_BEFORE_S, REPORT_S = 120, 60
_SCRIPT = """\
#!/bin/bash
{directives}
cd {folder} || exit
choice={choice}
[ ! -e {run}/metrics.jsonl ] && [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || choice=--resume
exec {streamrl} launch {run}/slurm/{config} --slurm --no-view{strict} $choice
"""


def config_name(config: RunConfig) -> str:
    """Of the file that a job reads when it starts; another job of the run may be submitted, with
    other settings, while it is pending."""
    return f"config-{hashlib.sha256(to_yaml(config).encode()).hexdigest()[:12]}.yaml"


def job_script(
    config: RunConfig,
    num_nodes: int,
    options: Sequence[str],
    choice: str = "",
    *,
    strict: bool = False,
) -> str:
    """`options` are further ones of sbatch, as name or name=value; they win over ours. `choice` is
    --resume or --new, of a run that is there; "" if neither was given. `strict` is that of the
    launch.

    Raises:
        ConfigError: an option is written in another way.
    """
    run = config.run.path
    return _SCRIPT.format(
        directives="\n".join(_directives(config, num_nodes, options)),
        folder=shlex.quote(str(Path.cwd())),
        run=shlex.quote(str(run)),
        choice=choice,
        config=config_name(config),
        streamrl=shlex.quote(executable()),
        strict=" --strict" if strict else "",
    )


def _directives(config: RunConfig, num_nodes: int, options: Sequence[str]) -> Iterator[str]:
    yield "# One task on each node; the launcher starts a step of one task for each process."
    yield f"#SBATCH --job-name=streamrl-{config.run.name}"
    yield f"#SBATCH --nodes={num_nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    yield "#SBATCH --exclusive"
    yield "#SBATCH --requeue"
    if config.cluster.on_host_failure == "continue":
        yield "#SBATCH --no-kill"
    before_s = max(STOP_BEFORE_S, math.ceil(config.stop_within_s) + REPORT_S)
    yield f"#SBATCH --signal=B:USR1@{before_s}"
    yield f"#SBATCH --output={config.run.path / 'logs' / 'slurm.log'}"
    yield "#SBATCH --open-mode=append"
    for option in options:
        yield f"#SBATCH --{_checked(option)}"


def _checked(option: str) -> str:
    name = option.partition("=")[0]
    if not name or name.startswith("-") or "\n" in option or " " in name:
        raise ConfigError(
            f"--sbatch: was {option!r}; give sbatch's option without dashes, such as "
            "--sbatch partition=gpu --sbatch gpus-per-node=8"
        )
    return option
