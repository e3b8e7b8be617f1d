"""A filter of system calls for a program of the sandbox, as Linux' seccomp takes it.

Invariant: what is refused is refused for good, to the program and to all that it starts. A refused
call fails with EPERM; only `clone3` fails with ENOSYS, so that the C library takes `clone` instead.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Mapping, Sequence

_AUDIT_ARCH: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Sockets, the calls that make one by another way, other processes' memory, mounts and namespaces.
_REFUSED: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "socket": 41,
        "ptrace": 101,
        "mount": 165,
        "umount2": 166,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "bpf": 321,
        "userfaultfd": 323,
        "io_uring_setup": 425,
        "move_mount": 429,
        "fsmount": 432,
        "pidfd_getfd": 438,
        "mount_setattr": 442,
    },
    "aarch64": {
        "umount2": 39,
        "mount": 40,
        "unshare": 97,
        "ptrace": 117,
        "socket": 198,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "perf_event_open": 241,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "bpf": 280,
        "userfaultfd": 282,
        "io_uring_setup": 425,
        "move_mount": 429,
        "fsmount": 432,
        "pidfd_getfd": 438,
        "mount_setattr": 442,
    },
}
# New processes and signals to others, where no namespace of processes keeps them apart.
_OF_PROCESSES: Mapping[str, Mapping[str, int]] = {
    "x86_64": {"fork": 57, "vfork": 58, "kill": 62, "tkill": 200, "pidfd_send_signal": 424},
    "aarch64": {"kill": 129, "tkill": 130, "pidfd_send_signal": 424},
}
_CLONE: Mapping[str, int] = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_CLONE_NEWUSER, _CLONE_THREAD = 0x10000000, 0x00010000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT_0 = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38


class _Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def has_filter() -> bool:
    """Whether this kind of machine has a table above."""
    return platform.system() == "Linux" and platform.machine() in _AUDIT_ARCH


def refuse_calls(*, with_processes: bool) -> None:
    """Refuses the calls above from here on, to this process and its children.

    Args:
        with_processes: also to start a process, which a thread is not, or to signal another one.

    Raises:
        OSError: the kernel takes no filter.
    """
    machine = platform.machine()
    refused = {*_REFUSED[machine].values()}
    if with_processes:
        refused |= {*_OF_PROCESSES[machine].values()}
    code = b"".join(_instructions(machine, sorted(refused), with_processes))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def _instructions(machine: str, refused: Sequence[int], with_processes: bool) -> list[bytes]:
    """The filter: each is an operation, where to go on if it holds and if not, and its operand."""
    permission = _ERRNO | errno.EPERM
    lines = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, permission),
    ]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, permission)]
    lines += [
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 0, 5, _CLONE[machine]),
        (_LOAD, 0, 0, _ARGUMENT_0),
        (_HAS_BITS, 0, 1, _CLONE_NEWUSER),
        (_RETURN, 0, 0, permission),
        (_HAS_BITS, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, permission if with_processes else _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return [struct.pack("=HBBI", *line) for line in lines]
