"""The nodes of a job as the hosts of its plan.

Invariant: every node is asked on the node, within a step as those of the run, so its GPUs are those
that a step sees.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from streamrl.cli.launchers.slurm.steps import ON_NODES
from streamrl.errors import ConfigError, StreamRLError
from streamrl.placement.hosts import facts_here
from streamrl.placement.plan import Device, Host


def hosts_of_job() -> tuple[Host, ...]:
    """In Slurm's order; the first one is where the launcher runs.

    Raises:
        ConfigError: there is no Slurm here.
        StreamRLError: Slurm does not answer, or a node does not.
    """
    names = _output("scontrol", "show", "hostnames").split()
    answers = _ask_all(names)
    return tuple(_host(answers[name]) for name in names)


def _ask_all(names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """What this module prints on each node, by name. Waits for all of them."""
    step = ["srun", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1"]
    said = _output(*step, *ON_NODES, sys.executable, "-P", "-m", __name__)
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    facts = {answer["name"]: answer for answer in answers}
    if missing := sorted(set(names) - set(facts)):
        raise StreamRLError(f"node {missing[0]} of the job did not answer")
    return facts


def _host(answer: Mapping[str, Any]) -> Host:
    devices = tuple(Device(**device) for device in answer["devices"])
    return Host(**{**answer, "devices": devices})


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(f"--slurm: there is no `{command[0]}` here") from None
    if done.returncode != 0:
        raise StreamRLError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    """On a node: its name, its address, and what it has, as a line of JSON."""
    name = os.environ["SLURMD_NODENAME"]
    shown = _output("scontrol", "show", "--oneliner", "node", name)
    found = re.search(r"NodeAddr=(\S+)", shown)
    address = found.group(1) if found else name
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(address)
    facts = asdict(facts_here(address))
    print(json.dumps({"name": name, "address": address, **facts}), flush=True)


if __name__ == "__main__":
    main()
