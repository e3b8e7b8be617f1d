"""The nodes of a job as the hosts of its plan.

Invariant: every node is asked on the node, within a step as those of the run, so its GPUs are those
that a step sees. `cluster.hosts`, where it is given, describes the nodes by their order: roles,
generators, interface; names and addresses are the job's.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from streamrl.cli.launchers.slurm.steps import ON_NODES
from streamrl.config import RunConfig
from streamrl.config.cluster import HostSettings
from streamrl.errors import ConfigError, StreamRLError
from streamrl.placement.hosts import HostFacts, facts_here, hosts_of
from streamrl.placement.plan import Device, Host


def hosts_of_job(config: RunConfig) -> tuple[Host, ...]:
    """In Slurm's order; the first one is where the launcher runs.

    Raises:
        ConfigError: the job has more or fewer nodes than `cluster.hosts`.
        StreamRLError: Slurm does not answer, or a node does not.
    """
    names = _output("scontrol", "show", "hostnames").split()
    described = config.cluster.hosts or tuple(HostSettings(name=name) for name in names)
    if len(described) != len(names):
        raise ConfigError(
            f"cluster.hosts: has {len(described)} hosts, and the job {len(names)} nodes; they are "
            "given to each other by their order"
        )
    facts = _ask_all(names)
    nodes = [
        given.model_copy(update={"name": name, "address": facts[name]["address"], "ssh": ""})
        for given, name in zip(described, names, strict=True)
    ]
    cluster = config.cluster.model_copy(update={"hosts": tuple(nodes)})
    hosts = hosts_of(
        config.model_copy(update={"cluster": cluster}), lambda host: _facts(facts[host.name])
    )
    # Slurm reaches all of them alike, this one too.
    return tuple(
        replace(host, ssh="", num_cores=host.num_cores or _facts(facts[host.name]).num_cores)
        for host in hosts
    )


def _ask_all(names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """What this module prints on each node, by name. Waits for all of them."""
    step = ["srun", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1"]
    said = _output(*step, *ON_NODES, sys.executable, "-P", "-m", __name__)
    answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    facts = {answer["name"]: answer for answer in answers}
    if missing := sorted(set(names) - set(facts)):
        raise StreamRLError(f"node {missing[0]} of the job did not answer")
    return facts


def _facts(answer: Mapping[str, Any]) -> HostFacts:
    devices = tuple(Device(**device) for device in answer["devices"])
    return HostFacts(devices, answer["num_cores"], answer["is_counted"], answer["interface"])


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
