"""Checks this machine: what the kernel says about it, whether its limits and disk leave room for a
run, and how well it isolates programs that a model wrote.

Invariant: facts are read only from the kernel, never from anything that can hang; reading never
fails, and a fact that this kernel does not tell is None, 0 or empty. A check is a function of these
facts.
"""

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from actors.sandbox.isolation import Isolation
from streamrl.findings import MACHINE, Finding
from streamrl.placement.hosts import cpu_quota, visible_cores
from streamrl.placement.plan import gib

_BFLOAT16_FLAGS = frozenset({"avx512bw", "bf16"})


@dataclass(frozen=True)
class Machine:
    """Facts about a machine. `cores` is the number visible to this process, and `cpu_quota` its
    control group's quota, in cores; limits are this process's, None for no limit. Sizes are in
    bytes."""

    system: str = "Linux"
    cores: int = 1
    cpu_quota: float | None = None
    memory: int = 0
    memory_limit: int | None = None
    shm: int = 0
    shm_free: int = 0
    max_files: int | None = None
    max_locked: int | None = None
    has_infiniband: bool = False
    max_processes: int | None = None
    threads_max: int | None = None
    cpu_flags: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def lacks_bfloat16(self) -> bool:
        """Whether torch multiplies bfloat16 without oneDNN here, which is about ten times slower
        than float32. False if unknown."""
        return bool(self.cpu_flags) and not self.cpu_flags & _BFLOAT16_FLAGS

    @property
    def usable_memory(self) -> int:
        """The memory that processes here may use together; 0 if unknown."""
        return min(self.memory, self.memory_limit or self.memory)


def read_machine(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Machine:
    """Read the facts; tests set `root`, the folder of the kernel's files."""
    shm, shm_free = _sizes(root / "dev/shm")
    memory = _field(root / "proc/meminfo", "MemTotal").split()[:1]
    memory_limit = _number(root / "sys/fs/cgroup/memory.max")
    return Machine(
        system=platform.system(),
        cores=visible_cores(),
        cpu_quota=cpu_quota(root),
        memory=int(memory[0]) * 1024 if memory and memory[0].isdigit() else 0,
        memory_limit=memory_limit or _number(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"),
        shm=shm,
        shm_free=shm_free,
        # The hard limit, since every command raises the soft one to it.
        max_files=_limit(resource.RLIMIT_NOFILE, 1),
        max_locked=_limit(resource.RLIMIT_MEMLOCK, 0),
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
        max_processes=_limit(resource.RLIMIT_NPROC, 0),
        threads_max=_number(root / "sys/fs/cgroup/pids.max"),
        cpu_flags=frozenset(_field(root / "proc/cpuinfo", "flags", "Features").split()),
        environment=dict(os.environ) if environment is None else environment,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _field(path: Path, *names: str) -> str:
    """The value of the first line with one of these names; "" without one."""
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value
    return ""


def _sizes(folder: Path) -> tuple[int, int]:
    """Total and free bytes of the folder's disk."""
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return found.total, found.free


def _limit(limit: int, place: int) -> int | None:
    value = resource.getrlimit(limit)[place]
    return None if value == resource.RLIM_INFINITY else value


_FEW_FILES = 1024
_FEW_PROCESSES = 4096
_FEW_LOCKED = 64 * 2**20
_SMALL_SHM = 512 * 2**20
_SMALL_MEMORY = 4 * 2**30
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _of_python(machine: Machine) -> Finding:
    version = f"Python {platform.python_version()} on {machine.system}"
    if machine.system != "Linux":
        remedy = "run it on Linux, which is what it is tested on"
        return MACHINE.warning(f"{version}: only Linux is tested", remedy)
    return MACHINE.ok(version)


def _of_open_files(machine: Machine) -> Finding:
    """A daemon has a socket for each peer and files for each thread of an engine."""
    limit = machine.max_files
    sentence = f"{limit or 'any number of'} open files a process"
    remedy = "raise the hard limit (ulimit -Hn), as docker run --ulimit nofile=65536 does"
    if limit is not None and limit < _FEW_FILES:
        return MACHINE.problem(sentence, remedy)
    if limit is not None and limit <= _FEW_FILES:
        return MACHINE.warning(f"{sentence} are few for many generators", remedy)
    return MACHINE.ok(sentence)


def _of_locked_memory(machine: Machine) -> Finding:
    """Memory that InfiniBand writes into is locked; nothing else locks much memory."""
    limit = machine.max_locked
    amount = "any amount" if limit is None else gib(limit)
    if not machine.has_infiniband or limit is None or limit >= _FEW_LOCKED:
        return MACHINE.ok(f"{amount} can be locked")
    return MACHINE.warning(
        f"{amount} of memory can be locked, and InfiniBand needs more",
        "ulimit -l unlimited, or --ulimit memlock=-1 for a container",
    )


def _of_processes(machine: Machine) -> Finding:
    """Threads count as processes, and an engine has hundreds."""
    limits = (machine.max_processes, machine.threads_max)
    limit = min((number for number in limits if number is not None), default=None)
    if limit is not None and limit < _FEW_PROCESSES:
        remedy = "ulimit -u 65536, or --pids-limit -1 for a container"
        return MACHINE.warning(f"{limit} processes and threads are few", remedy)
    return MACHINE.ok(f"{limit or 'any number of'} processes and threads")


def _of_shared_memory(machine: Machine) -> Finding:
    """NCCL and an engine's workers use it; sending weights on this machine does not."""
    size, free = machine.shm, machine.shm_free
    sentence = f"/dev/shm has {gib(size)}, {gib(free)} of it free"
    remedy = "docker run --shm-size 8g or --ipc host; on a host: mount -o remount,size=8G /dev/shm"
    if not size:
        return MACHINE.warning("there is no /dev/shm", remedy)
    if free < _SMALL_SHM:
        needed = f"{sentence}: NCCL and the workers of an engine need more"
        return MACHINE.warning(needed, remedy)
    return MACHINE.ok(sentence)


def _of_memory(machine: Machine) -> Finding:
    memory = machine.usable_memory
    whose = "the control group's limit" if memory < machine.memory else "this machine's"
    sentence = f"{gib(memory)} of memory, {whose}"
    if memory and memory < _SMALL_MEMORY:
        remedy = "give it 4 GiB or more: a daemon with torch takes about 1"
        return MACHINE.warning(sentence, remedy)
    return MACHINE.ok(sentence)


def _of_cores(machine: Machine) -> Finding:
    """Libraries choose their number of threads by the cores, which do not reflect a quota."""
    cores, quota = machine.cores, machine.cpu_quota
    if quota is not None and quota < cores:
        return MACHINE.warning(
            f"{cores} cores are visible, the control group's quota is {quota:g}: libraries start "
            "a thread a core and are throttled",
            "docker run --cpuset-cpus instead of --cpus, or, of daemons that no launch starts, "
            f"OMP_NUM_THREADS={max(1, int(quota))}",
        )
    return MACHINE.ok(f"{cores} cores")


def _of_threads(machine: Machine) -> Finding:
    """`streamrl launch` divides the cores unless a value is set, which is kept."""
    values = {name: v for name in _THREADS if (v := machine.environment.get(name))}
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    many = [name for name, v in values.items() if v.isdigit() and int(v) > machine.cores]
    if many:
        sentence = f"{shown}, and there are {machine.cores} cores"
        return MACHINE.warning(sentence, f"unset {' '.join(many)}: launch shares the cores out")
    return MACHINE.ok(shown or "OMP_NUM_THREADS is not set: launch shares the cores out")


CHECKS: Mapping[str, Callable[[Machine], Finding]] = {
    "python": _of_python,
    "cores": _of_cores,
    "threads": _of_threads,
    "memory": _of_memory,
    "shared memory": _of_shared_memory,
    "open files": _of_open_files,
    "processes": _of_processes,
    "locked memory": _of_locked_memory,
}
"""The checks, each by the cause of its finding."""


def check_machine(machine: Machine) -> Iterator[Finding]:
    return (replace(check(machine), cause=cause) for cause, check in CHECKS.items())


_FEW_BYTES, _TIGHT_BYTES = 200 * 2**20, 10 * 2**30
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "beegfs", "gpfs", "ceph")
_VOLATILE = ("tmpfs", "ramfs")


class Disk(NamedTuple):
    """The disk where a folder is, or will be made; `file_system` is "" if unknown."""

    folder: Path
    free: int
    file_system: str


def _existing_above(folder: Path) -> Path:
    """Return the path itself if it exists, else its nearest parent that does."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())


def why_not_made(folder: Path) -> str:
    """Return why the folder cannot be created and written, found by writing where it will be; "" if
    it can."""
    existing = _existing_above(folder)
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        return f"{existing} cannot be written: {error.strerror}"
    return ""


def read_disk(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Disk:
    """Return the disk of the folder, or of its nearest existing parent."""
    existing = _existing_above(folder)
    return Disk(existing, _sizes(existing)[1], _file_system(existing.resolve(), mounts))


def check_disk(disk: Disk, *, has_journal: bool = True) -> Iterator[Finding]:
    """Check the disk. `has_journal`: the buffer keeps a journal in the folder."""
    room, cause = f"{disk.folder} has {disk.free / 2**30:.3g} GiB free", "disk"
    remedy = "free some, or set run.folder to another disk"
    if disk.free < _FEW_BYTES:
        yield MACHINE.problem(room, remedy, cause=cause)
    elif disk.free < _TIGHT_BYTES:
        yield MACHINE.warning(f"{room}, which a few checkpoints fill", remedy, cause=cause)
    else:
        yield MACHINE.ok(room, cause=cause)
    cause = "file system"
    place = f"{disk.folder} is on {disk.file_system or 'an unknown file system'}"
    if disk.file_system in _NETWORK and has_journal:
        yield MACHINE.warning(
            f"{place}, where the locks of the buffer's journal (SQLite) are not to be trusted",
            "set run.folder to a local disk for the buffer's host, or use buffer.url redis://",
            cause=cause,
        )
    elif disk.file_system in _VOLATILE:
        sentence = f"{place}: a restart of the machine loses the run"
        yield MACHINE.warning(sentence, "set run.folder to a disk", cause=cause)
    else:
        yield MACHINE.ok(place, cause=cause)


def _file_system(path: Path, mounts: Path) -> str:
    """Return the file system of the innermost mount that contains the path; "" if unknown."""
    best, found = -1, ""
    for line in _text(mounts).splitlines():
        before, _, after = line.partition(" - ")
        words, kinds = before.split(), after.split()
        if len(words) < 5 or not kinds:
            continue
        place = Path(words[4].replace("\\040", " "))
        if path.is_relative_to(place) and len(place.parts) >= best:
            best, found = len(place.parts), kinds[0]
    return found


_REMEDY = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or use a kernel with "
    "Landlock (5.13, boot option lsm=landlock,...) and a container engine that lets it through"
)


def check_isolation(lacks: Mapping[Isolation, str]) -> Iterator[Finding]:
    """Check the isolation of programs. `lacks`: what the machine lacks for each kind, see
    `why_not`."""
    reasons = "; ".join(f"{kind}: {reason}" for kind, reason in lacks.items() if reason)
    programs, cause = "programs that a model wrote", "sandbox"
    if not lacks["namespaces"]:
        yield MACHINE.ok(f"{programs} get namespaces of their own", cause=cause)
    elif not lacks["landlock"]:
        yield MACHINE.ok(f"{programs} are held by Landlock ({reasons})", cause=cause)
    else:
        sentence = f"nothing here keeps {programs} apart ({reasons})"
        yield MACHINE.warning(sentence, _REMEDY, cause=cause)
