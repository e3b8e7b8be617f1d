"""A machine as the host of a plan, and its GPUs by the names that it gives them."""

import ctypes
import socket

import pytest

from streamrl.placement import hosts
from streamrl.placement.hosts import interface_of, named, num_threads, this_machine
from streamrl.placement.plan import Device
from tests.unit.placement.plans import configured

FOUND = (Device(0, 8, "first"), Device(1, 9, "second"))


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "usable_devices", lambda: FOUND)


@pytest.mark.parametrize(("quota", "num_cores"), [(None, 8), (2.5, 2), (0.5, 1), (64.0, 8)])
def test_this_machine_says_what_it_has(monkeypatch, quota, num_cores):
    monkeypatch.setattr(hosts, "visible_cores", lambda: 8)
    monkeypatch.setattr(hosts, "cpu_quota", lambda: quota)
    host = this_machine()
    assert (host.name, host.address, host.devices) == ("here", "127.0.0.1", FOUND)
    assert host.num_cores == num_cores


@pytest.mark.parametrize(
    ("variable", "wanted"),
    [(None, 7), ("", 7), ("4", 4), ("4,2", 4), (" 3 ", 3), ("0", 7), ("many", 7)],
)
def test_the_number_of_threads_is_read_as_openmp_reads_it(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, wanted: int
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert num_threads(otherwise=7) == wanted


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
        ("6,-1,4", [(6, "6", 8)]),
    ],
)
def test_devices_keep_the_names_by_which_they_are_visible(variable, seen):
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    found = FOUND[: len(seen)]
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
    count = hosts.driver_devices.__wrapped__
    assert count() == (Device(0, 80 * 2**30, "NVIDIA H100"),)


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert hosts.driver_devices.__wrapped__() == ()


@pytest.mark.parametrize("port", [0, 1023, 65_001])
def test_ports_are_those_that_a_user_may_listen_at(port):
    with pytest.raises(ValueError, match="first_port"):
        configured(cluster={"first_port": port})
