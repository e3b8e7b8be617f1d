"""A real Slurm on this machine: munged, slurmctld and a slurmd for each virtual node.

Every node is a network namespace with an address of its own, on a bridge in the controller's
namespace, so what listens on a node's loopback address is out of the others' reach. Nothing of it
is seen by the rest of the machine, and `close` leaves nothing behind. The run's folder is the same
for all nodes, as a shared file system would be.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PACKAGES = ("slurm-wlm", "munge")
NETWORK = "10.77.0"
CORES_PER_NODE = 4
DEADLINE_S = 120.0
CONF = """
ClusterName=streamrl
SlurmctldHost={host}({network}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=60
KillWait=20
NodeName=n[1-{num_nodes}] NodeAddr={network}.[1-{num_nodes}] CPUs={cores} RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why Slurm cannot run here, "" if it can; its packages are installed if need be."""
    if os.geteuid() != 0:
        return "Slurm's daemons and network namespaces need root"
    if not all(map(shutil.which, PROGRAMS)) and not _install():
        return f"Slurm is not installed, and apt-get cannot install {' '.join(PACKAGES)}"
    probe = f"streamrl-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "network namespaces cannot be made here (`ip netns add`)"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


def _install() -> bool:
    if shutil.which("apt-get") is None:
        return False
    install = ["apt-get", "install", "--quiet", "--yes", "--no-install-recommends"]
    quietly = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ([*install, *PACKAGES], ["apt-get", "update"], [*install, *PACKAGES]):
        subprocess.run(command, capture_output=True, env=quietly)
        if all(map(shutil.which, PROGRAMS)):
            return True
    return False


@dataclass
class SlurmCluster:
    """Nodes n1, n2, ...; `folder` is for Slurm's own files."""

    folder: Path
    num_nodes: int
    prefix: str = field(default_factory=lambda: f"slurm{secrets.token_hex(4)}")

    def start(self) -> None:
        """Waits until every node is idle."""
        (self.folder / "state").mkdir(parents=True)
        self._make_network()
        conf = CONF.format(
            host=os.uname().nodename,
            folder=self.folder,
            num_nodes=self.num_nodes,
            network=NETWORK,
            cores=CORES_PER_NODE,
        )
        (self.folder / "slurm.conf").write_text(conf)
        # The nodes make no cgroups, but slurmd looks for a version of them.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start_munged()
        self._within("net", "slurmctld", "-f", str(self.folder / "slurm.conf"))
        for index in range(1, self.num_nodes + 1):
            self.start_node(f"n{index}")
        self._until_idle()

    def run(self, *command: str, check: bool = True) -> str:
        """Standard output of a command beside the controller; with `check` it must succeed."""
        return self._within("net", *command, check=check)

    def start_node(self, node: str) -> None:
        (self.folder / "spool" / node).mkdir(parents=True, exist_ok=True)
        self._within(node, "slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def kill_node(self, node: str) -> None:
        """As a power failure: slurmd and all that runs on the node, and its network is gone."""
        subprocess.run(["ip", "-n", self._name(node), "link", "set", "eth0", "down"], check=True)
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self, node: str) -> Sequence[psutil.Process]:
        """All that runs in the node's namespace."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._name(node)], capture_output=True, text=True
        )
        found = []
        for word in listed.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(word)))
        return found

    def close(self) -> None:
        """End every process of the cluster, and remove its namespaces."""
        names = ["net", *(f"n{i}" for i in range(1, self.num_nodes + 1))]
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for name in names for process in self.processes(name)]
            for process in (*running, *self._munged()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            psutil.wait_procs(running, timeout=10)
        for name in names:
            subprocess.run(["ip", "netns", "delete", self._name(name)], capture_output=True)

    def _name(self, node: str) -> str:
        return f"{self.prefix}-{node}"

    def _munged(self) -> Sequence[psutil.Process]:
        with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
            return [psutil.Process(int((self.folder / "munged.pid").read_text()))]
        return []

    def _make_network(self) -> None:
        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True)

        bridge = self._name("net")
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", bridge, "address", "add", f"{NETWORK}.254/24", "dev", "br0")
        ip("-n", bridge, "link", "set", "br0", "up")
        ip("-n", bridge, "link", "set", "lo", "up")
        for index in range(1, self.num_nodes + 1):
            node = self._name(f"n{index}")
            ip("netns", "add", node)
            peer = ("peer", "name", "eth0", "netns", node)
            ip("-n", bridge, "link", "add", f"v{index}", "type", "veth", *peer)
            ip("-n", bridge, "link", "set", f"v{index}", "master", "br0", "up")
            ip("-n", node, "address", "add", f"{NETWORK}.{index}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")
            ip("-n", node, "link", "set", "lo", "up")

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        options = {
            "key-file": key,
            "socket": self.folder / "munge.socket",
            "pid-file": self.folder / "munged.pid",
            "log-file": self.folder / "munged.log",
            "seed-file": self.folder / "munge.seed",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        # pytest's folders are below /tmp, where everybody may write, which munged dislikes.
        subprocess.run(["munged", "--force", *words], check=True, capture_output=True)

    def _until_idle(self) -> None:
        give_up = time.monotonic() + DEADLINE_S
        while self.run("sinfo", "-h", "-N", "-o", "%t").split() != ["idle"] * self.num_nodes:
            assert time.monotonic() < give_up, (self.folder / "slurmctld.log").read_text()
            time.sleep(0.2)

    def _within(self, name: str, *command: str, check: bool = True) -> str:
        """Run it in the namespace; daemons go into the background by themselves."""
        output = self.folder / "command.log"
        with output.open("w") as file:
            done = subprocess.run(
                ["ip", "netns", "exec", self._name(name), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "net" and command[0] != "slurmctld" else file,
                stderr=file,
                text=True,
                env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
            )
        assert done.returncode == 0 or not check, (command, output.read_text())
        return done.stdout or ""
