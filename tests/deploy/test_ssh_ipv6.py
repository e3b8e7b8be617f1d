"""`streamrl launch` on hosts that have IPv6 addresses alone, one of which must not fail."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import namespaces
from tests.deploy.namespaces import Machine, Network
from tests.deploy.test_ssh import Run, assert_nothing_is_left, audit
from tests.system.conftest import CONFIG

if why := namespaces.missing():
    pytest.skip(f"ssh: {why}", allow_module_level=True)

HOSTS = """
cluster:
  on_host_failure: stop
  silence_s: 60
  start_s: 60
  hosts:
  - {{name: a, address: "{a}", generators: 0}}
  - {{name: b, address: "{b}", generators: 1}}
  - {{name: c, address: "{c}", roles: [generator], generators: 1}}
"""


@contextlib.contextmanager
def without_ipv4(net: Network) -> Iterator[None]:
    """Other tests find the hosts as they were, all of them on."""

    def ip(host: Machine, *words: str) -> None:
        subprocess.run(["ip", "-n", host.namespace, *words, "dev", "eth0"], check=True)

    for host in net.hosts.values():
        ip(host, "-4", "address", "flush")
    try:
        yield
    finally:
        for name, host in list(net.hosts.items()):
            ip(host, "address", "add", f"{host.address}/24")
            if host.init.poll() is not None:
                net.start(name)


def test_the_loss_of_a_host_that_must_not_fail_ends_a_run(net: Network, tmp_path: Path):
    desk = net.hosts["desk"]
    addresses = {name: host.address_6 for name, host in net.hosts.items()}
    text = CONFIG.format(folder=tmp_path, model="models/copy") + HOSTS.format(**addresses)
    (desk.home / "run.yaml").write_text(text)
    settings = ("--set", "run.max_steps=100000", "--set", "learner.num_ranks=2")
    with without_ipv4(net):
        run = Run(desk, tmp_path / "run", *settings)
        run.until_step(3)
        run.until_generators(2)
        net.hosts["c"].power_off()
        assert run.end() == 5, run.output
        assert "host c: " in run.output.splitlines()[-1]
        assert_nothing_is_left(net, "desk", "a", "b")
        assert "\nin order\n" in audit(net.hosts["a"], run.folder)
