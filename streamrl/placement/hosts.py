"""A machine as the host of a plan: its GPUs, cores and network, determined on the machine itself.

Called by the command line, and by launchers on each of their machines. GPUs are counted by the
driver, without torch. Invariant: devices that CUDA_VISIBLE_DEVICES hides are not listed. A process
asks the driver once, which reads the variable then.
"""

import ctypes
import fcntl
import ipaddress
import os
import re
import shutil
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from streamrl.config.addresses import is_loopback, url_host
from streamrl.errors import ConfigError
from streamrl.placement.plan import Device, Host

_ROCM = Path("/dev/kfd")


def is_rocm() -> bool:
    """Whether the GPUs here are AMD's, which CUDA's driver does not count."""
    return _ROCM.exists()


def num_cores() -> int:
    """Return the number of cores that this process may use: the visible ones, or fewer if its
    control group has a lower quota."""
    return max(1, min(visible_cores(), int(cpu_quota() or visible_cores())))


def visible_cores() -> int:
    """Return the number of cores visible to this process; all if the system cannot say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the control group's quota in cores; None without one. `root` has the kernel's
    files."""
    group = root / "sys" / "fs" / "cgroup"
    try:
        if (file := group / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            files = (group / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text() for file in files)
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None


def num_threads(otherwise: int) -> int:
    """Return OMP_NUM_THREADS as OpenMP reads it: the first number of a list (one per nesting
    level); `otherwise` if it is unset or not a number."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else otherwise


def compilers() -> tuple[str, ...]:
    """Return the compilers that torch.compile may use: for C++, and on a GPU, where Triton
    compiles, also for C."""
    names = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return (*names, "gcc", "clang") if torch_has_cuda() else names


def has_compiler() -> bool:
    return any(map(shutil.which, compilers()))


def usable_devices() -> tuple[Device, ...]:
    """Return the devices that the driver sees and the installed torch can use."""
    if is_rocm() or not torch_has_cuda():
        return ()
    return named(driver_devices(), os.environ)


def named(found: tuple[Device, ...], environment: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices with their names in CUDA_VISIBLE_DEVICES; if these are numbers, they
    become the indices.

    >>> [d.visible_as for d in named((Device(0),), {"CUDA_VISIBLE_DEVICES": "GPU-1f,GPU-2e"})]
    ['GPU-1f']
    """
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return found
    names = _visible(listed)
    are_numbers = all(map(str.isdecimal, names))
    return tuple(
        replace(device, index=int(name) if are_numbers else device.index, visible_as=name)
        for name, device in zip(names, found, strict=False)
    )


def _visible(listed: str) -> list[str]:
    """Return the device names up to the first invalid one. A name such as -1 hides those after it,
    as does a change between indices and UUIDs; a duplicate hides all.

    >>> _visible("1,2,-1,0"), _visible("GPU-2e, GPU-1f"), _visible("NoDevFiles"), _visible("0,0")
    (['1', '2'], ['GPU-2e', 'GPU-1f'], [], [])
    """
    names = [name.strip() for name in listed.split(",")]
    form = r"\d+" if names[0].isdecimal() else "(GPU|MIG)-.*"
    found = list(takewhile(re.compile(form).fullmatch, names))
    return found if len({*found}) == len(found) else []


def visible_alone(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a process finds only `device`; {} if it has no number.

    >>> visible_alone("cuda:1", {"CUDA_VISIBLE_DEVICES": "GPU-1f,GPU-2e"})
    {'CUDA_VISIBLE_DEVICES': 'GPU-2e'}
    >>> visible_alone("cuda", {})
    {}

    Raises:
        ConfigError: fewer devices are visible.
    """
    _, _, number = device.partition(":")
    if not number:
        return {}
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return {"CUDA_VISIBLE_DEVICES": number}
    names = _visible(listed)
    if int(number) >= len(names):
        raise ConfigError(
            f"generator.device: was {device!r}, and CUDA_VISIBLE_DEVICES names {len(names)}: "
            f"{listed!r}"
        )
    return {"CUDA_VISIBLE_DEVICES": names[int(number)]}


@cache
def driver_devices() -> tuple[Device, ...]:
    """Ask libcuda for the devices that CUDA_VISIBLE_DEVICES leaves to this process; () without a
    driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    number = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return ()
    found: list[Device] = []
    for index in range(number.value):
        handle, size = ctypes.c_int(0), ctypes.c_size_t(0)
        name = ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(handle), index)
        driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
        driver.cuDeviceGetName(name, len(name), handle)
        found.append(Device(index, size.value, name.value.decode(errors="replace")))
    return tuple(found)


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for GPUs, as its version file says, without importing
    it; true if unknown."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    builds = re.findall(r"^(?:cuda|hip)\b[^=]*= *(\w+|['\"])", text, re.MULTILINE)
    return not builds or any(build != "None" for build in builds)


_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def this_machine(name: str = "here", address: str = "127.0.0.1") -> Host:
    """Return the machine that this process runs on, with all its GPUs and this process's cores. The
    default name and address suffice for a run's only host."""
    return Host(
        name,
        address,
        usable_devices(),
        num_cores(),
        interface=interface_of(address),
        is_counted=not is_rocm(),
    )


def interface_of(address: str) -> str:
    """Return the network interface with this address; "" if there is none or it is loopback."""
    if not address or is_loopback(f"tcp://{url_host(address)}:0"):
        return ""
    if ":" in address:
        with suppress(ValueError, OSError):
            wanted = int(ipaddress.IPv6Address(address))
            rows = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
            return next((row[-1] for row in rows if int(row[0], 16) == wanted), "")
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
