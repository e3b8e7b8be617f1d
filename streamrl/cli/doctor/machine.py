"""The facts of this machine, read from the kernel's files, and from nothing that can hang.

Invariant: reading never fails; what this kernel does not say is None, 0 or empty.
"""

import ctypes
import os
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_NUM_TIMEX_BYTES, _TIME_ERROR = 208, 5
_BFLOAT16_FLAGS = frozenset({"avx512bw", "bf16"})
_CONTAINERS = {"docker": ".dockerenv", "podman": "run/.containerenv"}


@dataclass(frozen=True)
class Machine:
    """`cores` may be used by this process, `cpu_quota` is that of its control group in cores;
    limits are those of this process, None for none. Sizes are bytes."""

    python: tuple[int, int, int] = (3, 11, 0)
    system: str = "Linux"
    cores: int = 1
    cpu_quota: float | None = None
    memory: int = 0
    memory_limit: int | None = None
    shm: int = 0
    shm_free: int = 0
    max_files: int | None = None
    hard_max_files: int | None = None
    max_locked: int | None = None
    max_processes: int | None = None
    threads_max: int | None = None
    cpu_flags: frozenset[str] = frozenset()
    container: str = ""
    ptrace_scope: int | None = None
    overcommit: int | None = None
    is_clock_synchronized: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def lacks_bfloat16(self) -> bool:
        """Whether torch multiplies bfloat16 without oneDNN here: about ten times slower than
        float32. False if that is not known."""
        return bool(self.cpu_flags) and not self.cpu_flags & _BFLOAT16_FLAGS


def read_machine(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Machine:
    """`root` is where the kernel's files are, for tests."""
    shm, shm_free = _shm(root / "dev/shm")
    environment = dict(os.environ) if environment is None else environment
    version = platform.python_version_tuple()
    return Machine(
        python=(int(version[0]), int(version[1]), 0),
        system=platform.system(),
        cores=_num_cores(),
        cpu_quota=_cpu_quota(root),
        memory=_memory(root),
        memory_limit=_memory_limit(root),
        shm=shm,
        shm_free=shm_free,
        max_files=_limit("RLIMIT_NOFILE", 0),
        hard_max_files=_limit("RLIMIT_NOFILE", 1),
        max_locked=_limit("RLIMIT_MEMLOCK", 0),
        max_processes=_limit("RLIMIT_NPROC", 0),
        threads_max=_number(root / "sys/fs/cgroup/pids.max"),
        cpu_flags=_cpu_flags(root),
        container=_container(root, environment),
        ptrace_scope=_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        overcommit=_number(root / "proc/sys/vm/overcommit_memory"),
        is_clock_synchronized=_is_clock_synchronized(),
        environment=environment,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota(root: Path) -> float | None:
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not quota:
        old = root / "sys/fs/cgroup/cpu"
        quota = _text(old / "cpu.cfs_quota_us").strip()
        period = _text(old / "cpu.cfs_period_us").strip()
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def _memory(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        kib = value.split()[:1]
        if name == "MemTotal" and kib and kib[0].isdigit():
            return int(kib[0]) * 1024
    return 0


def _memory_limit(root: Path) -> int | None:
    new = _number(root / "sys/fs/cgroup/memory.max")
    return new or _number(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")


def _shm(path: Path) -> tuple[int, int]:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0, 0
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _limit(name: str, place: int) -> int | None:
    number = getattr(resource, name, None)
    if number is None:
        return None
    value = resource.getrlimit(number)[place]
    return None if value == resource.RLIM_INFINITY else value


def _cpu_flags(root: Path) -> frozenset[str]:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def _container(root: Path, environment: Mapping[str, str]) -> str:
    """Its kind; "" where none is recognized."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    found = (kind for kind, file in _CONTAINERS.items() if (root / file).exists())
    return next(found, environment.get("container", ""))


def _is_clock_synchronized() -> bool | None:
    """What the kernel knows of it, from adjtimex(2), which changes nothing with no mode."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (OSError, AttributeError):
        return None
    state = int(adjtimex(ctypes.create_string_buffer(_NUM_TIMEX_BYTES)))
    return None if state < 0 else state != _TIME_ERROR
