"""Machines made of namespaces: each has an address, processes, a home folder, shared memory and a
/tmp/ray of its own, and an sshd; what they send each other stays on a bridge between them.

    with network(folder, "a", "b") as hosts:
        hosts["a"].run("hostname")
        hosts["b"].power_off()

Invariant: everything is gone at the end: processes, namespaces, mounts. Needs root, `ip`, `unshare`
and `sshd`.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "ss": "iproute2"}
DEADLINE_S = 240.0
ROOT = Path(__file__).parents[2]

_SSHD = """
Port 22
ListenAddress {address}
HostKey {keys}/{name}
AuthorizedKeysFile {keys}/authorized
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
SetEnv PYTHONPATH={root}
"""
_PASSWD = "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
# The first process of the machine ends with all others.
_BOOT = """
mount --bind {home}.passwd /etc/passwd && mount -t tmpfs none /dev/shm && mkdir -p /tmp/ray &&
mount -t tmpfs none /tmp/ray && hostname {name} && exec {command}
"""


def missing() -> str:
    """Why no such machine can be made here; "" if it can. Installs what Debian has."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    lacking = [package for tool, package in PACKAGES.items() if _which(tool) is None]
    if lacking and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", *lacking]):
            subprocess.run(["apt-get", *command], capture_output=True, check=False)
    lacking = [tool for tool in PACKAGES if _which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    probe = subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "may not make namespaces here"


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass
class Machine:
    name: str
    address: str
    home: Path
    init: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        """The machine's first process, as this machine counts them."""
        return psutil.Process(self.init.pid).children()[0].pid

    def command(self, *words: str) -> list[str]:
        """What runs a command on the machine."""
        inside = ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-u"]
        script = 'cd "$0" && HOME="$0" exec "$@"'
        return [*inside, "sh", "-c", script, str(self.home), *words]

    def run(self, *words: str) -> str:
        return subprocess.run(
            self.command(*words), capture_output=True, text=True, check=True, timeout=DEADLINE_S
        ).stdout

    def processes(self) -> dict[int, str]:
        """Ids here, and command lines, of what runs there beside sshd and the machine itself."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found: dict[int, str] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                words = " ".join(process.cmdline())
                is_own = os.readlink(f"/proc/{process.pid}/ns/pid") == namespace
                if is_own and words and "sshd" not in words and process.pid != self.pid:
                    found[process.pid] = words
        return found

    def power_off(self) -> None:
        """Everything on it ends at once, without notice."""
        os.kill(self.pid, signal.SIGKILL)
        self.init.wait(DEADLINE_S)


@contextlib.contextmanager
def network(folder: Path, *names: str) -> Iterator[Mapping[str, Machine]]:
    """The machines, which know each other's keys and are in each other's known_hosts."""
    keys, tag = _make_keys(folder, names), f"s{secrets.token_hex(4)}"
    switch = f"{tag}-switch"
    addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
    hosts: dict[str, Machine] = {}
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for name in names:
            _plug(f"{tag}-{name}", switch, name, addresses[name])
            hosts[name] = _boot(folder, keys, name, addresses, f"{tag}-{name}")
        yield hosts
    finally:
        for host in hosts.values():
            if host.init.poll() is None:
                host.power_off()
        for namespace in (*(f"{tag}-{name}" for name in names), switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _plug(namespace: str, switch: str, name: str, address: str) -> None:
    _ip("netns", "add", namespace)
    _ip(
        *("-n", namespace, "link", "add", "eth0", "type", "veth"),
        *("peer", "name", f"port-{name}", "netns", switch),
    )
    _ip("-n", switch, "link", "set", f"port-{name}", "master", "bridge", "up")
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _ip("-n", namespace, "link", "set", device, "up")


def _boot(
    folder: Path,
    keys: Path,
    name: str,
    addresses: Mapping[str, str],
    namespace: str,
) -> Machine:
    home = folder / "homes" / name
    ssh = home / ".ssh"
    ssh.mkdir(parents=True, exist_ok=True)
    shutil.copy(keys / "identity", ssh / "id_ed25519")
    (ssh / "id_ed25519").chmod(0o600)
    known = (f"{a} {(keys / f'{n}.pub').read_text()}" for n, a in addresses.items())
    (ssh / "known_hosts").write_text("".join(known))
    home.with_name(f"{name}.passwd").write_text(f"root:x:0:0:root:{home}:/bin/sh\n{_PASSWD}")
    config = keys / f"{name}.config"
    config.write_text(_SSHD.format(address=addresses[name], keys=keys, name=name, root=ROOT))
    Path("/run/sshd").mkdir(exist_ok=True)
    script = _BOOT.format(home=home, name=name, command=f"{_which('sshd')} -D -e -f {config}")
    words = ["ip", "netns", "exec", namespace]
    words += ["unshare", "-m", "-u", "-p", "--fork", "--mount-proc", "--propagation", "private"]
    with (folder / f"sshd-{name}.log").open("ab") as log:
        init = subprocess.Popen(
            [*words, "sh", "-c", script], stdout=log, stderr=log, start_new_session=True
        )
    machine = Machine(name, addresses[name], home, init)
    _wait(lambda: _listens(namespace), f"sshd of {name}")
    return machine


def _make_keys(folder: Path, names: Sequence[str]) -> Path:
    keys = folder / "keys"
    keys.mkdir(mode=0o700)
    for name in ("identity", *names):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)]
        subprocess.run(command, check=True)
    shutil.copy(keys / "identity.pub", keys / "authorized")
    return keys


def _listens(namespace: str) -> bool:
    words = ["ip", "netns", "exec", namespace, "ss", "-Hltn", "sport = :22"]
    return bool(subprocess.run(words, capture_output=True, check=True).stdout)


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            sys.exit(f"{what} does not come")
        time.sleep(0.05)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
