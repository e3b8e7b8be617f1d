"""`streamrl launch FILE --slurm`: submits a job; within a job or an allocation, runs on its nodes.

Invariant: a job is what is in RUN/slurm: `config-HASH.yaml` with every value resolved when it was
submitted, and `job.sh`, which a person could submit as well.
"""

import argparse
import os
import subprocess
from pathlib import Path

from streamrl.checkpoints.find import require_steps_to_launch
from streamrl.cli.launchers import JOB_VARIABLE
from streamrl.cli.launchers.slurm.job import run_in_job
from streamrl.cli.launchers.slurm.keys import make_missing_keys, with_keys
from streamrl.cli.launchers.slurm.script import config_name, job_script
from streamrl.cli.processes.run_commands import prepared
from streamrl.cli.processes.sole_launch import sole_launch
from streamrl.config import RunConfig, to_yaml
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, StreamRLError


def launch(config: RunConfig, arguments: argparse.Namespace) -> int:
    if job := os.environ.get(JOB_VARIABLE):
        _require_no_options(arguments, job)
        return run_in_job(config, arguments, job)
    return _submit(config, arguments)


def _submit(config: RunConfig, arguments: argparse.Namespace) -> int:
    num_nodes = arguments.nodes or 1
    has_own_keys = config.buffer.curve is None and num_nodes > 1
    if has_own_keys:
        config = with_keys(config)
    choice = "--resume" if arguments.resume else "--new" if arguments.new else ""
    sbatch, strict = arguments.sbatch, arguments.strict
    script = job_script(config, num_nodes, sbatch, choice, strict=strict)
    if arguments.dry_run:
        print(script, end="")
        return 0
    with sole_launch(config.run.path):
        _write_job(config, script, arguments, has_own_keys=has_own_keys)
    print(_sbatch(config.run.path / "slurm" / "job.sh"))
    print(f"streamrl status {config.run.path}; its output is {config.run.path}/logs/slurm.log")
    return 0


def _write_job(
    config: RunConfig, script: str, arguments: argparse.Namespace, *, has_own_keys: bool
) -> None:
    require_steps_to_launch(config, resume=arguments.resume, new=arguments.new)
    prepared(config, arguments, binds=False)
    if has_own_keys:
        make_missing_keys(config)
    folder = config.run.path / "slurm"
    folder.mkdir(exist_ok=True)
    (config.run.path / "logs").mkdir(exist_ok=True)
    write_file(folder / config_name(config), to_yaml(config))
    write_file(folder / "job.sh", script)


def _sbatch(script: Path) -> str:
    """What sbatch says: the number of the job.

    Raises:
        ConfigError: there is no Slurm here.
        StreamRLError: Slurm does not take the job.
    """
    try:
        done = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("--slurm: there is no `sbatch` here; it runs on a login node") from None
    if done.returncode != 0:
        raise StreamRLError(f"sbatch: {done.stderr.strip()}; the script is {script}")
    return done.stdout.strip()


def _require_no_options(arguments: argparse.Namespace, job: str) -> None:
    """
    Raises:
        ConfigError: options for a job that is submitted are given within one.
    """
    name = "--nodes" if arguments.nodes else "--sbatch" if arguments.sbatch else ""
    if name:
        raise ConfigError(
            f"{name}: this is job {job}, whose nodes are used as they are; unset {JOB_VARIABLE} to "
            "submit another job"
        )
