"""The system calls that a program of the sandbox may make, as a seccomp filter.

`make_filter` lets libseccomp compile the names below; it runs once in the daemon, and each program
loads its result. Invariant: calls that are not named here, including those of newer kernels, are
refused with EPERM to the program and everything that it starts; this cannot be undone.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from functools import cache
from itertools import chain, product

from actors.sandbox.privileges import LIBC, call

# Calls about the program itself, and about files, which the file system or Landlock guards. Left
# out, since they reach further: sync, inotify (instances are counted per user), memfd_create (no
# limit counts it), shmget and the like, io_uring, keys, tracing, mounts, and names of namespaces.
_ALLOWED = """
    brk mmap mremap munmap mprotect madvise mincore msync mlock mlock2 munlock mlockall munlockall
    membarrier mseal pkey_alloc pkey_free pkey_mprotect get_mempolicy set_mempolicy mbind
    read readv pread64 preadv preadv2 write writev pwrite64 pwritev pwritev2 lseek sendfile splice
    tee vmsplice copy_file_range fadvise64 readahead fallocate ftruncate fsync fdatasync
    sync_file_range close close_range dup dup2 dup3 pipe pipe2 flock creat
    stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getdents
    getdents64 getcwd chdir fchdir umask mkdir mkdirat rmdir unlink unlinkat rename renameat
    renameat2 link linkat symlink symlinkat statfs fstatfs
    poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
    epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
    sendto recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown getsockopt setsockopt getsockname
    getpeername
    execve exit exit_group wait4 waitid getpid getppid gettid getpgrp getpgid getsid setsid getuid
    geteuid getgid getegid getresuid getresgid getgroups capget arch_prctl set_tid_address
    set_robust_list rseq futex futex_waitv futex_wake futex_wait futex_requeue sched_yield
    sched_getaffinity sched_getscheduler sched_getparam sched_getattr sched_get_priority_max
    sched_get_priority_min sched_rr_get_interval getpriority getrlimit setrlimit getrusage times
    sysinfo uname getcpu getrandom time gettimeofday clock_gettime clock_getres clock_nanosleep
    nanosleep pause alarm getitimer setitimer timer_create timer_settime timer_gettime
    timer_getoverrun timer_delete rt_sigaction rt_sigprocmask rt_sigpending rt_sigsuspend
    rt_sigtimedwait rt_sigreturn sigaltstack restart_syscall
"""
# Also allowed if the program has its own process namespace and file system.
_ALLOWED_APART = """
    fork vfork kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal
    setpgid setpriority ioprio_get ioprio_set prlimit64 sched_setaffinity sched_setscheduler
    sched_setparam sched_setattr chmod fchmod fchmodat chown fchown lchown fchownat utime utimes
    utimensat futimesat truncate mkfifo mknod mknodat
"""
# The C library falls back to an older call.
_UNKNOWN = "clone3 openat2 fchmodat2"

_SELF = 2**31 - 2
"""Stands for the program's own process id in a filter; no process has this id."""
_EQUAL, _MASKED = 4, 7
_CLONE_THREAD, _CLONE_NAMESPACES = 0x00010000, 0x7E020080
_F_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
"""fcntl: duplicates, flags, locks, reading a pipe's size, seals; no owner, lease or
notification."""
_IOCTLS = (0x5401, 0x5413, 0x5421, 0x5450, 0x5451, 0x541B)
"""TCGETS, TIOCGWINSZ, FIONBIO, FIONCLEX, FIOCLEX, FIONREAD."""
_PR_OPTIONS = (2, 3, 15, 16, 21, 23, 30, 38, 39, 42, 0x53564D41)
"""prctl: queries, names of threads and of memory, no_new_privs."""
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OPTIMIZE, _AS_TREE = 8, 2
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF


class _Condition(ctypes.Structure):
    """A condition on an argument (counted from 0): it equals `value`, or masked with `value` it
    equals `bits`."""

    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("bits", ctypes.c_uint64),
    ]


_Rule = tuple[str, tuple[tuple[int, int, int, int], ...]]


@cache
def make_filter(*, is_apart: bool) -> bytes:
    """Compile the filter; return its instructions.

    Args:
        is_apart: for a program that sees only its own processes and files: it may start and signal
            processes, and change the mode of files.

    Raises:
        OSError: libseccomp is not installed, or does not know this machine.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise OSError("libseccomp.so.2 is not installed (apt-get install libseccomp2)") from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ERRNO | errno.EPERM))
    if not context:
        raise OSError("libseccomp does not know this machine")
    try:
        library.seccomp_attr_set(context, _OPTIMIZE, _AS_TREE)
        for name in _UNKNOWN.split():
            _add(library, context, _ERRNO | errno.ENOSYS, (name, ()))
        for rule in _rules(is_apart):
            _add(library, context, _ALLOW, rule)
        read, write = os.pipe()
        with open(read, "rb") as compiled:
            with open(write, "wb"):
                failure = library.seccomp_export_bpf(context, write)
            if failure:
                raise OSError(-failure, f"libseccomp: {os.strerror(-failure)}")
            return compiled.read()
    finally:
        library.seccomp_release(context)


def load(code: bytes) -> None:
    """Apply a filter to this process and its children. Needs `no_new_privs`. Raises OSError if the
    kernel does not accept it."""
    own, filter_ = os.getpid(), bytearray(code)
    for place in range(0, len(filter_), 8):
        operation, yes, no, operand = struct.unpack_from("=HBBI", filter_, place)
        if operand == _SELF:
            struct.pack_into("=HBBI", filter_, place, operation, yes, no, own)
    buffer = ctypes.create_string_buffer(bytes(filter_), len(filter_))
    program = struct.pack("@HP", len(filter_) // 8, ctypes.addressof(buffer))
    arguments = ctypes.c_ulong(_MODE_FILTER), program, 0, 0
    call("the kernel takes no filter of system calls", LIBC.prctl, _PR_SET_SECCOMP, *arguments)


def _add(library: ctypes.CDLL, context: ctypes.c_void_p, action: int, rule: _Rule) -> None:
    """Add the rule, unless the machine has no such call."""
    name, conditions = rule
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:
        return
    array = (_Condition * len(conditions))(*(_Condition(*one) for one in conditions))
    failure = library.seccomp_rule_add_array(context, action, number, len(conditions), array)
    if failure:
        raise OSError(-failure, f"libseccomp: {name}: {os.strerror(-failure)}")


def _rules(is_apart: bool) -> Iterator[_Rule]:
    """The allowed calls, each with conditions on its arguments; a call may appear with several
    conditions."""
    apart = _ALLOWED_APART.split() if is_apart else []
    yield from ((name, ()) for name in chain(_ALLOWED.split(), apart))
    commands = [("fcntl", _F_COMMANDS, 1), ("ioctl", _IOCTLS, 1), ("prctl", _PR_OPTIONS, 0)]
    for name, values, place in commands:
        yield from ((name, (_is(place, value),)) for value in values)
    # Truncating a read-only file on opening it is a write, which not every version of Landlock
    # refuses.
    written = (_has(os.O_TRUNC, 0), _has(os.O_ACCMODE, os.O_WRONLY), _has(os.O_ACCMODE, os.O_RDWR))
    for (name, place), condition in product((("open", 1), ("openat", 2)), written):
        yield name, ((place, *condition),)
    yield "socketpair", (_is(0, _AF_UNIX), (1, *_has(_SOCK_TYPE, _SOCK_STREAM)))
    if is_apart:
        yield "clone", ((0, *_has(_CLONE_NAMESPACES, 0)),)
        return
    yield "clone", ((0, *_has(_CLONE_NAMESPACES | _CLONE_THREAD, _CLONE_THREAD)),)
    yield from ((name, (_is(0, _SELF),)) for name in ("kill", "tgkill"))
    yield from ((name, (_is(0, 0),)) for name in ("prlimit64", "sched_setaffinity"))


def _is(argument: int, value: int) -> tuple[int, int, int, int]:
    return (argument, _EQUAL, value, 0)


def _has(mask: int, bits: int) -> tuple[int, int, int]:
    return (_MASKED, mask, bits)
