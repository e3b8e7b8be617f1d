"""What a program of the sandbox tries on others, and what comes of it.

Each row is a harmless try on a process or a file that the test made. The cells are what is seen:
"refused", "out of sight" where there is nothing of that name, "allowed".
"""

from typing import NamedTuple


class Attempt(NamedTuple):
    """`code` runs in the program and raises OSError unless it succeeds."""

    what: str
    code: str
    namespaces: str = "refused"
    landlock: str = "refused"


UNSEEN = "out of sight"

ATTEMPTS = (
    Attempt("signal a process: `kill`", "os.kill(pid, 0)", UNSEEN),
    Attempt("all processes: `kill(-1)`", "os.kill(-1, 0)", UNSEEN),
    Attempt("a process group: `killpg`", "os.killpg(pid, 0)", UNSEEN),
    Attempt("`tkill`", "call('tkill', pid, 0)", UNSEEN),
    Attempt("`tgkill`", "call('tgkill', pid, pid, 0)", UNSEEN),
    Attempt("`rt_sigqueueinfo`", "call('rt_sigqueueinfo', pid, 0, SIGINFO)", UNSEEN),
    Attempt("`rt_tgsigqueueinfo`", "call('rt_tgsigqueueinfo', pid, pid, 0, SIGINFO)", UNSEEN),
    Attempt(
        "`pidfd_open`, `pidfd_send_signal`", "signal_by_descriptor(os.pidfd_open(pid))", UNSEEN
    ),
    Attempt(
        "`pidfd_send_signal` by `/proc/PID`",
        "signal_by_descriptor(os.open(f'/proc/{pid}', os.O_RDONLY))",
        UNSEEN,
    ),
    Attempt("be its owner of a pipe: `F_SETOWN`", "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, pid)"),
    Attempt("`F_SETOWN_EX`", "fcntl.fcntl(os.pipe()[0], 15, struct.pack('=ii', 1, pid))"),
    Attempt("read memory: `process_vm_readv`", "move_memory('process_vm_readv')"),
    Attempt("write memory: `process_vm_writev`", "move_memory('process_vm_writev')"),
    Attempt("trace: `ptrace`", "call('ptrace', 0x4206, pid, 0, 0)"),
    Attempt("compare: `kcmp`", "call('kcmp', pid, pid, 1, 0, 0)"),
    Attempt("take a descriptor: `pidfd_getfd`", "call('pidfd_getfd', 0, 0, 0)"),
    Attempt("advise: `process_madvise`", "call('process_madvise', 0, 0, 0, 0, 0)"),
    Attempt("move pages: `move_pages`", "call('move_pages', pid, 0, 0, 0, 0, 0)"),
    Attempt("observe: `perf_event_open`", "call('perf_event_open', 0, pid, -1, -1, 0)"),
    *(
        Attempt(
            f"read `/proc/PID/{name}`", f"os.read(os.open(f'/proc/{{pid}}/{name}', 0), 1)", UNSEEN
        )
        for name in ("environ", "cmdline", "maps", "mem", "status")
    ),
    *(
        Attempt(f"list `/proc/PID/{name}`", f"os.listdir(f'/proc/{{pid}}/{name}')", UNSEEN)
        for name in ("root", "cwd", "fd", "map_files", "task")
    ),
    *(
        Attempt(
            f"write `/proc/PID/{name}`", f"os.open(f'/proc/{{pid}}/{name}', os.O_WRONLY)", UNSEEN
        )
        for name in ("mem", "oom_score_adj", "clear_refs", "autogroup", "timerslack_ns")
    ),
    Attempt(
        "change its priority: `setpriority`", "os.setpriority(os.PRIO_PROCESS, pid, 5)", UNSEEN
    ),
    Attempt("of its process group", "os.setpriority(os.PRIO_PGRP, pid, 5)", UNSEEN),
    Attempt("of its reads and writes: `ioprio_set`", "call('ioprio_set', 1, pid, 0x4006)", UNSEEN),
    Attempt(
        "its cores: `sched_setaffinity`",
        "os.sched_setaffinity(pid, os.sched_getaffinity(0))",
        UNSEEN,
    ),
    Attempt(
        "its scheduler: `sched_setscheduler`",
        "os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))",
        UNSEEN,
    ),
    Attempt(
        "`sched_setattr`", "call('sched_setattr', pid, ctypes.create_string_buffer(48), 0)", UNSEEN
    ),
    Attempt(
        "its limits: `prlimit`",
        "resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64))",
        UNSEEN,
    ),
    Attempt("its control group", "os.listdir('/sys/fs/cgroup')", UNSEEN),
    Attempt("read a file of another program's folder", "open(others)", UNSEEN),
    Attempt("of the home folder", "open(home)", UNSEEN),
    Attempt("of the run's folder", "open(run)", UNSEEN),
    Attempt("of `/dev/shm`", "open(shared)", UNSEEN),
    Attempt("list `/etc`, but for what programs need", "open('/etc/hostname')", UNSEEN),
    Attempt("write beside its folder", "open('../written', 'w')"),
    Attempt("in `/tmp`", "open('/tmp/written-by-the-sandbox', 'w')"),
    Attempt("in Python's library", "os.open(os.__file__, os.O_WRONLY)"),
    Attempt("empty a file that it may read", "os.open('main.py', os.O_RDONLY | os.O_TRUNC)"),
    Attempt(
        "change its mode: `chmod`", "os.chmod(os.__file__, os.stat(os.__file__).st_mode & 0o777)"
    ),
    Attempt("its times: `utimensat`", "os.utime(os.__file__, (before.st_atime, before.st_mtime))"),
    Attempt("its attributes: `setxattr`", "os.setxattr('main.py', 'user.x', b'')"),
    Attempt("link it into its folder", "os.link(os.__file__, 'linked')"),
    Attempt("make others wait for it: `F_SETLEASE`", "fcntl.fcntl(open('main.py'), 1024, 2)"),
    *(
        Attempt(f"open a socket: `{family}`", f"socket.socket(socket.{family})")
        for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK")
    ),
    Attempt("two that can send elsewhere", "socket.socketpair(type=socket.SOCK_DGRAM)"),
    Attempt("queues of calls: `io_uring_setup`", "call('io_uring_setup', 1, 0)"),
    Attempt("share memory: `shmget`", "call('shmget', 7, 1, 0o600)"),
    Attempt("messages: `mq_open`", "call('mq_open', 0, 0, 0, 0)"),
    Attempt("keys: `keyctl`", "call('keyctl', 0, -3, 0)"),
    Attempt("watch files: `inotify_init1`", "call('inotify_init1', 0)"),
    Attempt("memory that no limit counts: `memfd_create`", "os.memfd_create('x')"),
    Attempt("flush all disks: `sync`", "call('sync')"),
    Attempt("new namespaces: `unshare`", "call('unshare', 0x10000000)"),
    Attempt("mount: `mount`", "call('mount', 0, 0, 0, 0, 0)"),
    Attempt("load code into the kernel: `bpf`", "call('bpf', 0, 0, 0)"),
    Attempt("start a process: `fork`", "fork()", "allowed"),
    Attempt("signal itself", "os.kill(os.getpid(), 0)", "allowed", "allowed"),
    Attempt("write in its folder", "open('written', 'w').close()", "allowed", "allowed"),
    Attempt("read `/proc/self`", "open('/proc/self/status').read(1)", "allowed", "allowed"),
)

CALLS = (
    *("tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal", "ptrace"),
    *("process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise"),
    *("move_pages", "perf_event_open", "ioprio_set", "sched_setattr", "io_uring_setup", "shmget"),
    *("mq_open", "keyctl", "inotify_init1", "sync", "unshare", "mount", "bpf"),
)

PROGRAM = """
import ctypes, errno, fcntl, json, os, resource, socket, struct, sys
given = json.loads(sys.stdin.read())
numbers, attempts = given.pop("numbers"), given.pop("attempts")
pid, address, others, home, run, shared = (given[name] for name in (
    "pid", "address", "others", "home", "run", "shared"))
before = os.stat(os.__file__)
libc = ctypes.CDLL(None, use_errno=True)
SIGINFO = ctypes.create_string_buffer(struct.pack("=iii", 0, 0, -1), 128)

def call(name, *arguments):
    arguments = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if libc.syscall(ctypes.c_long(numbers[name]), *arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def signal_by_descriptor(descriptor):
    call("pidfd_send_signal", descriptor, 0, 0, 0)

def move_memory(name):
    here = ctypes.create_string_buffer(b"harmless", 8)
    parts = [struct.pack("@PN", place, 8) for place in (ctypes.addressof(here), address)]
    call(name, pid, parts[0], 1, parts[1], 1, 0)

def fork():
    if not os.fork():
        os._exit(0)
    os.wait()

def outcome(code):
    try:
        exec(code)
    except OSError as error:
        unseen = error.errno in (errno.ESRCH, errno.ENOENT)
        known = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EXDEV)
        return "out of sight" if unseen else "refused" if error.errno in known else str(error)
    return "allowed"

print(json.dumps({"user": os.getuid(), "outcomes": [outcome(code) for code in attempts]}))
"""
