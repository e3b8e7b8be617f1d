"""Whether the machine's limits leave room for a run: each check is a function of its facts."""

from collections.abc import Callable, Iterator

from streamrl.cli.doctor.findings import Finding, ok, problem, warn
from streamrl.cli.doctor.machine import Machine

_FEW_FILES, _MANY_FILES = 1024, 65_536
_FEW_PROCESSES = 4096
_FEW_LOCKED = 64 * 2**20
_SMALL_SHM = 512 * 2**20
_SMALL_MEMORY = 4 * 2**30
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def check_python(machine: Machine) -> Iterator[Finding]:
    major, minor, _ = machine.python
    version = f"Python {major}.{minor} on {machine.system}"
    if machine.python < (3, 11, 0):
        yield problem("python", version, "StreamRL needs Python 3.11 or newer: install it")
    elif machine.system != "Linux":
        remedy = "run it on Linux, which is what it is tested on"
        yield warn("python", f"{version}: only Linux is tested", remedy)
    else:
        yield ok("python", version)


def check_open_files(machine: Machine) -> Iterator[Finding]:
    """A daemon has sockets for each peer and files for each thread of an engine."""
    limit, hard = machine.max_files, machine.hard_max_files
    sentence = f"{limit or 'any number of'} open files a process"
    most = "the hard limit" if hard is None else str(min(hard, _MANY_FILES))
    if limit is not None and limit < _FEW_FILES:
        yield problem("open files", sentence, f"ulimit -n {most}")
    elif limit is not None and limit <= _FEW_FILES:
        yield warn("open files", f"{sentence} are few for many generators", f"ulimit -n {most}")
    else:
        yield ok("open files", sentence)


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    limit = machine.max_locked
    if limit is None or limit >= _FEW_LOCKED:
        yield ok("locked memory", f"{_mib(limit)} can be locked")
        return
    yield warn(
        "locked memory",
        f"{_mib(limit)} of memory can be locked, which InfiniBand and pinned buffers need more of",
        "ulimit -l unlimited, or --ulimit memlock=-1 for a container; Ethernet needs none",
    )


def check_processes(machine: Machine) -> Iterator[Finding]:
    """Threads count as processes, and an engine has hundreds."""
    limits = (machine.max_processes, machine.threads_max)
    limit = min((number for number in limits if number is not None), default=None)
    if limit is not None and limit < _FEW_PROCESSES:
        remedy = "ulimit -u 65536, or --pids-limit -1 for a container"
        yield warn("processes", f"{limit} processes and threads are few", remedy)
    else:
        yield ok("processes", f"{limit or 'any number of'} processes and threads")


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """NCCL and the workers of an engine use it; weights for this machine do not."""
    size, free = machine.shm, machine.shm_free
    sentence = f"/dev/shm has {_mib(size)}, {_mib(free)} of it free"
    remedy = "docker run --shm-size 8g or --ipc host; on a host: mount -o remount,size=8G /dev/shm"
    if not size:
        yield warn("shared memory", "there is no /dev/shm", remedy)
    elif free < _SMALL_SHM:
        yield warn(
            "shared memory", f"{sentence}: NCCL and the workers of an engine need more", remedy
        )
    else:
        yield ok("shared memory", sentence)


def check_memory(machine: Machine) -> Iterator[Finding]:
    limit = machine.memory_limit
    is_limited = limit is not None and 0 < limit < machine.memory
    memory = limit if is_limited and limit is not None else machine.memory
    whose = "the control group's limit" if is_limited else "this machine's"
    sentence = f"{_mib(memory)} of memory, {whose}"
    if memory and memory < _SMALL_MEMORY:
        yield warn("memory", sentence, "give it 4 GiB or more: a daemon with torch takes about 1")
    else:
        yield ok("memory", sentence)


def check_cores(machine: Machine) -> Iterator[Finding]:
    """A quota does not show in the number of cores, by which libraries choose their threads."""
    cores, quota = machine.cores, machine.cpu_quota
    if quota is not None and quota < cores:
        yield warn(
            "cores",
            f"{cores} cores are visible, the control group's quota is {quota:g}: libraries start "
            "a thread a core and are throttled",
            f"docker run --cpuset-cpus instead of --cpus, or OMP_NUM_THREADS={max(1, int(quota))} "
            "and learner.num_threads, generator.num_threads",
        )
    else:
        yield ok("cores", f"{cores} cores")


def check_threads(machine: Machine) -> Iterator[Finding]:
    """`streamrl launch` shares the cores out where nothing is set; a value set is kept."""
    values = {name: machine.environment[name] for name in _THREADS if name in machine.environment}
    shown = ", ".join(f"{name}={value}" for name, value in values.items())
    many = [
        name for name, value in values.items() if value.isdigit() and int(value) > machine.cores
    ]
    if many:
        sentence = f"{shown}, and there are {machine.cores} cores"
        yield warn("threads", sentence, f"unset {' '.join(many)}: launch shares the cores out")
    else:
        yield ok("threads", shown or "OMP_NUM_THREADS is not set: launch shares the cores out")


def check_cpu(machine: Machine) -> Iterator[Finding]:
    flags = machine.cpu_flags
    known = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")
    found = [name for name in known if name in flags]
    if flags and not found:
        remedy = "train on GPUs, or on a processor with AVX2 or newer"
        yield warn("cpu", "the processor has neither AVX2 nor AVX-512 nor AMX", remedy)
    else:
        yield ok("cpu", f"the processor has {', '.join(found) or 'unknown features'}")


def check_container(machine: Machine) -> Iterator[Finding]:
    kind = machine.container
    yield ok("container", f"inside a container ({kind})" if kind else "no container is recognized")


def check_kernel(machine: Machine) -> Iterator[Finding]:
    """What copies between the processes of one machine need of the kernel."""
    scope = machine.ptrace_scope
    if scope is not None and scope >= 2:
        yield warn(
            "kernel",
            f"kernel.yama.ptrace_scope is {scope}: processes cannot read each other's memory, and "
            "NCCL and gloo copy through sockets instead; py-spy works as root alone",
            "sysctl kernel.yama.ptrace_scope=1, or --cap-add SYS_PTRACE for a container",
        )
    if machine.overcommit == 2:
        yield warn(
            "kernel",
            "vm.overcommit_memory is 2: torch and CUDA reserve more memory than they use, and fail",
            "sysctl vm.overcommit_memory=0",
        )
    if (scope or 0) < 2 and machine.overcommit != 2:
        yield ok("kernel", "no setting of the kernel is in the way")


def check_clock(machine: Machine) -> Iterator[Finding]:
    """Of several hosts each one checks its own; leases are on the buffer's clock alone."""
    if machine.is_clock_synchronized is False:
        yield warn(
            "clock",
            "the kernel's clock is not synchronized: times of logs and metrics of several hosts do "
            "not compare",
            "run chronyd or systemd-timesyncd on every host (a virtual machine may take its host's "
            "clock); no lease depends on it",
        )
    else:
        known = machine.is_clock_synchronized
        yield ok("clock", "the kernel's clock is synchronized" if known else "is not known here")


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    check_python,
    check_cores,
    check_threads,
    check_cpu,
    check_memory,
    check_shared_memory,
    check_open_files,
    check_processes,
    check_locked_memory,
    check_container,
    check_kernel,
    check_clock,
)


def _mib(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "any amount"
    gib = num_bytes / 2**30
    return f"{gib:.3g} GiB" if gib >= 1 else f"{num_bytes / 2**20:.3g} MiB"
