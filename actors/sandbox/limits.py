"""What a program of the sandbox may use, and what became of it."""

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class SandboxLimits:
    """Of one program; CPU time and open files are each process's."""

    time_s: float = 10.0
    """Wall-clock time, from the start to the end of all its processes."""
    memory_bytes: int = 512 * 2**20
    """Address space of each process, and memory of all together."""
    num_processes: int = 16
    """Processes and threads at a time."""
    num_files: int = 64
    """Files that a process has open at a time."""
    folder_bytes: int = 64 * 2**20
    """The working folder, and the longest file; without namespaces the longest file alone."""
    output_bytes: int = 64 * 2**10
    """Of standard output, and again of standard error; who writes more is ended."""

    @property
    def cpu_s(self) -> int:
        """CPU time of each process, in whole seconds."""
        return int(self.time_s) + 1


@dataclass(frozen=True)
class SandboxResult:
    """What became of a program."""

    stdout: str
    stderr: str
    exit_code: int | None
    """Negative: the signal that ended it. None: a limit ended it, as the flags say."""
    is_timed_out: bool = False
    is_output_cut: bool = False
    is_out_of_memory: bool = False
    """Its processes together; to a single one that asks for more, Python raises MemoryError."""

    @property
    def is_success(self) -> bool:
        return self.exit_code == 0

    def failure(self, limits: SandboxLimits) -> str:
        """Why it did not end with success, in a few words; "" if it did."""
        if self.is_timed_out:
            return f"it was ended after {limits.time_s:g} s"
        if self.is_output_cut:
            return f"it was ended after writing more than {limits.output_bytes} bytes"
        if self.is_out_of_memory:
            return f"it was ended for using more than {limits.memory_bytes} bytes of memory"
        if self.exit_code is not None and self.exit_code < 0:
            return f"it was ended by {_signal_name(-self.exit_code)}"
        return f"it ended with exit code {self.exit_code}" if self.exit_code else ""


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return "SIGXCPU, for its CPU time" if name == "SIGXCPU" else name
