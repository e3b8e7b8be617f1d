"""The hosts of a run: from the settings, from this machine, from one that is asked."""

import ctypes
import os
import socket

import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.placement import devices, hosts
from streamrl.placement.devices import named
from streamrl.placement.hosts import HostFacts, hosts_of, interface_of
from streamrl.placement.plan import Device
from tests.unit.placement.plans import configured

FOUND = (Device(0, 8, "first"), Device(1, 9, "second"))


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "usable_devices", lambda: FOUND)


def cluster(*given: dict[str, object]) -> RunConfig:
    return configured(cluster={"hosts": list(given)})


def test_without_a_cluster_this_machine_is_the_host():
    (host,) = hosts_of(configured())
    assert (host.name, host.ssh, host.devices) == ("here", "", FOUND)
    assert host.num_cores == len(os.sched_getaffinity(0))


def test_settings_say_how_many_devices_or_which():
    config = cluster(
        {"name": "a", "devices": 2, "device_memory_gib": 80, "cores": 96},
        {"name": "b", "devices": [3, 5], "address": "10.0.0.2", "ssh": "me@b", "interface": "ib0"},
        {"name": "c", "devices": 0, "roles": ["generator"], "generators": 2},
    )
    a, b, c = hosts_of(config)
    assert [(d.index, d.memory_bytes) for d in a.devices] == [(0, 80 * 2**30), (1, 80 * 2**30)]
    assert (a.num_cores, a.address, a.ssh) == (96, "a", "a")
    assert [d.visible_as for d in b.devices] == ["3", "5"]
    assert (b.num_cores, b.address, b.ssh, b.interface) == (0, "10.0.0.2", "me@b", "ib0")
    assert (c.devices, c.roles, c.generators) == ((), ("generator",), 2)


def test_this_machine_is_asked_for_what_is_left_open():
    name = socket.gethostname()
    by_name, loopback = hosts_of(
        cluster({"name": name}, {"name": "b", "address": "127.0.0.1", "devices": [1]})
    )
    assert (by_name.devices, by_name.ssh) == (FOUND, "")
    assert loopback.devices == (FOUND[1],)
    assert loopback.num_cores == len(os.sched_getaffinity(0))


def test_another_machine_is_asked_by_who_can():
    config = cluster({"name": "far", "cores": 4}, {"name": "near", "devices": 1})
    asked = []

    def ask(settings):
        asked.append(settings.name)
        return HostFacts((Device(0, 80),), 32, interface="eth7")

    far, near = hosts_of(config, ask)
    assert (far.devices, far.num_cores, far.interface) == ((Device(0, 80),), 4, "eth7")
    assert (near.devices, near.num_cores) == ((Device(0, 80),), 32)
    assert asked == ["far", "near"]
    with pytest.raises(ConfigError, match=r"cluster\.hosts: far is not this machine.*devices: 8"):
        hosts_of(config)


def test_the_interface_of_an_address_is_found_and_none_for_a_foreign_one():
    addresses = {interface_of(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), 0)}
    assert addresses <= {"", *(name for _, name in socket.if_nameindex())}
    assert interface_of("192.0.2.254") == ""
    assert interface_of("127.0.0.1") == ""


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        (None, [(0, "0", 8), (1, "1", 9)]),
        ("6,4", [(6, "6", 8), (4, "4", 9)]),
        ("GPU-1a, GPU-2b", [(0, "GPU-1a", 8), (1, "GPU-2b", 9)]),
        ("MIG-77", [(0, "MIG-77", 8)]),
    ],
)
def test_devices_keep_the_names_by_which_they_are_visible(variable, seen):
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    found = FOUND[:1] if variable == "MIG-77" else FOUND
    assert [(d.index, d.visible_as, d.memory_bytes) for d in named(found, environment)] == seen


def test_a_variable_that_hides_all_leaves_none():
    assert named((), {"CUDA_VISIBLE_DEVICES": ""}) == ()


class Driver:
    """What libcuda answers for one GPU."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, number):
        number._obj.value = 1
        return 0

    def cuDeviceGet(self, handle, index):
        handle._obj.value = index

    def cuDeviceTotalMem_v2(self, size, handle):
        size._obj.value = 80 * 2**30

    def cuDeviceGetName(self, name, length, handle):
        name.value = b"NVIDIA H100"


def test_the_driver_tells_memory_and_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    count = devices.driver_devices.__wrapped__
    assert count() == (Device(0, 80 * 2**30, "NVIDIA H100"),)


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert devices.driver_devices.__wrapped__() == ()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([{"name": "a"}, {"name": "a"}], "a is named twice"),
        ([{"name": "a", "devices": [1, 1]}], "devices.*1 is named twice"),
        ([{"name": "a", "devices": -1}], "devices"),
        ([{"name": "a", "roles": ["generators"]}], "roles"),
        ([{"name": "a b"}], "name"),
        ([{"name": "a", "device_memory_gib": 0}], "device_memory_gib"),
    ],
)
def test_hosts_that_cannot_be_meant_so_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        cluster(*given)


@pytest.mark.parametrize("port", [0, 1023, 65_001])
def test_ports_are_those_that_a_user_may_listen_at(port):
    with pytest.raises(ValueError, match="first_port"):
        configured(cluster={"first_port": port})
