"""Programs that attack: real processes under every isolation that this machine has."""

import asyncio
import gc
import os
import socket
import tempfile
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from actors.sandbox import isolation as isolations, sandbox as sandboxes
from actors.sandbox.isolation import Isolation, SandboxLimits
from actors.sandbox.sandbox import Sandbox, SandboxResult
from streamrl.errors import ConfigError
from tests.isolation import find_isolation
from tests.waiting import block_until

pytestmark = pytest.mark.skipif(find_isolation() is None, reason="no isolation on this machine")

LIMITS = SandboxLimits(time_s=120.0)


async def run(isolation: Isolation, code: str, **options: object) -> SandboxResult:
    return await Sandbox(LIMITS, isolation=isolation).run(code, **options)  # type: ignore[arg-type]


def processes_of(folder_mark: str) -> list[psutil.Process]:
    """Those whose environment names the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(folder_mark in value for value in process.environ().values()):
                found.append(process)
        except psutil.Error:
            continue
    return found


class TestPrograms:
    async def test_a_program_reads_its_input(self, isolation: Isolation) -> None:
        result = await run(isolation, "print(40 + int(input()))", stdin="2\n")
        assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "", 0)
        assert result.is_success
        assert result.failure(LIMITS) == ""

    async def test_the_input_is_a_file_that_cannot_be_changed(self, isolation: Isolation) -> None:
        code = (
            "import os\n"
            "print(os.read(0, os.fstat(0).st_size))\n"
            "open('/dev/stdin', 'r+b', 0).write(b'z')"
        )
        result = await run(isolation, code, stdin="2\n3\n")
        assert result.stdout == "b'2\\n3\\n'\n"
        assert "PermissionError" in result.stderr

    async def test_an_error_is_read_from_standard_error(self, isolation: Isolation) -> None:
        result = await run(isolation, "print('before'); 1 / 0")
        assert result.stdout == "before\n"
        assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
        assert result.failure(LIMITS) == "it ended with exit code 1"

    async def test_nothing_of_the_daemons_environment_is_seen(
        self, isolation: Isolation, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WANDB_API_KEY", "a-secret")
        result = await run(isolation, "import os; print(sorted(os.environ.items()))")
        assert "HOME" in result.stdout
        assert "a-secret" not in result.stdout

    async def test_threads_and_packages_work(self, isolation: Isolation) -> None:
        code = (
            "import numpy, threading\n"
            "seen = []\n"
            "threads = [threading.Thread(target=seen.append, args=(i,)) for i in range(3)]\n"
            "[t.start() for t in threads]; [t.join() for t in threads]\n"
            "print(len(seen), numpy.ones(3).sum())"
        )
        result = await run(isolation, code)
        assert result.stdout == "3 3.0\n"

    async def test_what_programs_commonly_do_works(self, isolation: Isolation) -> None:
        code = (
            "import concurrent.futures, os, pathlib, random, tempfile, time\n"
            "with tempfile.TemporaryDirectory() as name:\n"
            "    place = pathlib.Path(name, 'a'); place.write_text('x'); place.rename('b')\n"
            "with concurrent.futures.ThreadPoolExecutor(2) as pool: list(pool.map(abs, range(9)))\n"
            "os.makedirs('c/d'); os.symlink('b', 'e'); os.replace('b', 'c/d/b')\n"
            "print(len(os.listdir('/proc/self/fd')) > 2, random.SystemRandom().random() < 1)\n"
            "time.sleep(0); open('/dev/null', 'w').write('x')\n"
            "print(open('/dev/stdin', 'rb', 0).read(1), open('/dev/fd/0').read())\n"
            "for name in 'stdout', 'stderr': print(name, file=open(f'/dev/{name}', 'w'))"
        )
        result = await run(isolation, code, stdin="xy")
        assert (result.stderr, result.stdout) == ("stderr\n", "True True\nb'x' xy\nstdout\n")

    async def test_an_abort_is_told(self, isolation: Isolation) -> None:
        result = await run(isolation, "import os; os.abort()")
        assert result.failure(LIMITS) == "it was ended by SIGABRT"

    async def test_one_that_has_no_folder_leaves_nothing_open(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
        gc.collect()  # What other tests left open would be closed below.
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="the sandbox cannot start a program"):
            await Sandbox(LIMITS, isolation="none").run("print(1)")
        assert len(os.listdir("/proc/self/fd")) == len(before)


class TestChoice:
    def lacks(self, monkeypatch: pytest.MonkeyPatch, **reasons: str) -> None:
        monkeypatch.setattr(sandboxes, "why_not", lambda kind: reasons.get(kind, ""))

    def test_the_best_that_there_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lacks(monkeypatch)
        assert sandboxes.choose() == "namespaces"
        self.lacks(monkeypatch, namespaces="not permitted")
        assert sandboxes.choose() == "landlock"
        assert sandboxes.choose("landlock") == "landlock"

    async def test_nothing_is_run_that_nothing_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lacks(monkeypatch, namespaces="not permitted", landlock="too old")
        reasons = r"apart \(namespaces: not permitted; landlock: too old\); `isolation: none`"
        with pytest.raises(ConfigError, match=reasons):
            await Sandbox().run("print(1)")
        assert find_isolation() is None

    def test_one_that_is_asked_for_is_not_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lacks(monkeypatch, namespaces="not permitted")
        with pytest.raises(ConfigError, match=r"\(namespaces: not permitted\)"):
            sandboxes.choose("namespaces")

    async def test_none_has_the_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lacks(monkeypatch, namespaces="not permitted", landlock="too old")
        result = await Sandbox(LIMITS, isolation="none").run("print(1)\nx = bytearray(10**10)")
        assert result.stdout == "1\n"
        assert "MemoryError" in result.stderr

    def test_a_folder_for_temporary_files_may_have_any_name(
        self, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "temporary files"
        folder.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        assert sandboxes.why_not.__wrapped__(isolation) == ""

    def test_what_reads_files_of_the_machine_is_not_held(
        self, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        readable, links = isolations._files()
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            monkeypatch.setattr("tempfile.tempdir", folder)
            monkeypatch.setattr(isolations, "_files", lambda: ([*readable, folder], links))
            said = sandboxes.why_not.__wrapped__(isolation)
            assert said == "a program reaches files outside its folder"

    def test_attempts_are_those_of_the_own_user(
        self, isolation: Isolation, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whom rights alone would not hold, root above all; namespaces have users of their own."""
        # As where Python is for all users.
        job = sandboxes.job
        monkeypatch.setattr(sandboxes, "job", lambda *given: {**job(*given), "python": []})
        monkeypatch.setattr(sandboxes, "_PROBE", "import os, sys\nsys.exit(str(os.getuid()))")
        said = sandboxes.why_not.__wrapped__(isolation)
        assert said == str(os.getuid()) or isolation == "namespaces"

    @pytest.mark.parametrize("exit_code", [None, 0])
    def test_what_does_not_say_that_it_is_held_is_not(
        self, exit_code: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def end(*_: object) -> SandboxResult:
            return SandboxResult("", "", exit_code)

        monkeypatch.setattr(sandboxes, "_program", end)
        assert sandboxes.why_not.__wrapped__("namespaces")

    def test_no_data_beside_python_is_read(
        self, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A virtual environment may be the folder of a project."""
        monkeypatch.setattr("sys.prefix", str(tmp_path))
        tmp_path.joinpath("lib").mkdir()
        tmp_path.joinpath("answers.jsonl").touch()
        found, _ = isolations._files.__wrapped__()
        assert [path for path in found if path.startswith(str(tmp_path))] == [f"{tmp_path}/lib"]


class TestNetwork:
    async def test_a_socket_that_listens_here_is_not_reached(self, isolation: Isolation) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            port = server.getsockname()[1]
            code = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
            result = await run(isolation, code)
            assert "PermissionError" in result.stderr
            with pytest.raises(BlockingIOError):
                server.accept()

    async def test_a_unix_socket_is_not_reached(self, isolation: Isolation, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "s"))
            server.listen()
            code = (
                f"import socket\nsocket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})\n"
            )
            result = await run(isolation, code)
        assert "PermissionError" in result.stderr

    async def test_an_event_loop_runs(self, isolation: Isolation) -> None:
        code = "import asyncio\nasync def f(): print(await asyncio.sleep(0, 1))\nasyncio.run(f())"
        assert (await run(isolation, code)).stdout == "1\n"


class TestLimits:
    async def test_an_endless_loop_ends_at_the_time_limit(self, isolation: Isolation) -> None:
        limits = SandboxLimits(time_s=5.0)
        code = "print('started', flush=True)\nwhile True: pass"
        result = await run(isolation, code, limits=limits)
        assert (result.stdout, result.exit_code, result.is_timed_out) == ("started\n", None, True)
        assert result.failure(limits) == "it was ended after 5 s"

    async def test_an_eater_of_memory_is_refused(self, isolation: Isolation) -> None:
        result = await run(isolation, "x = []\nwhile True: x.append(bytearray(10**7))")
        assert result.stderr.endswith("MemoryError\n")

    async def test_a_flood_is_cut(self, isolation: Isolation) -> None:
        result = await run(isolation, "while True: print('x' * 1000)")
        assert len(result.stdout) == LIMITS.output_bytes
        assert result.is_output_cut
        assert result.failure(LIMITS) == "it was ended after writing more than 65536 bytes"

    async def test_a_flood_of_errors_is_cut(self, isolation: Isolation) -> None:
        code = "import sys\nwhile True: print('x' * 1000, file=sys.stderr)"
        assert (await run(isolation, code)).is_output_cut

    async def test_a_long_file_is_refused(self, isolation: Isolation) -> None:
        code = "f = open('x', 'wb')\nwhile True: f.write(bytes(10**7))"
        result = await run(isolation, code)
        assert "OSError" in result.stderr

    async def test_open_files_are_bounded(self, isolation: Isolation) -> None:
        code = "x = []\nwhile True: x.append(open('/dev/null'))"
        assert "Too many open files" in (await run(isolation, code)).stderr

    async def test_a_program_that_reads_no_input_ends(self, isolation: Isolation) -> None:
        result = await run(isolation, "print(1)", stdin="x" * 10**7)
        assert result.is_success


class TestProcesses:
    async def test_a_fork_bomb_is_bounded(self, isolation: Isolation) -> None:
        code = (
            "import os, time\n"
            "n = 0\n"
            "try:\n"
            "    while n < 1000:\n"
            "        if not os.fork(): time.sleep(1000)\n"
            "        n += 1\n"
            "except OSError: print(n)\n"
        )
        result = await run(isolation, code)
        assert int(result.stdout) <= LIMITS.num_processes

    async def test_threads_are_bounded(self, isolation: Isolation) -> None:
        code = (
            "import threading, time\n"
            "threading.stack_size(2**16)\n"
            "for _ in range(LIMIT):\n"
            "    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
            "time.sleep(1000)\n"
        ).replace("LIMIT", str(LIMITS.num_processes + 1))
        result = await run(isolation, code)
        assert not result.is_success
        assert not result.is_timed_out

    async def test_children_do_not_outlive_the_program(self, isolation: Isolation) -> None:
        mark = f"mark-{os.getpid()}-{isolation}"
        code = (
            "import subprocess, sys\n"
            f"environment = {{'MARK': {mark!r}}}\n"
            "sleep = 'import time; time.sleep(1000)'\n"
            "subprocess.Popen([sys.executable, '-c', sleep], env=environment,\n"
            "                 start_new_session=True)\n"
            "print('left one behind')\n"
        )
        result = await run(isolation, code)
        is_started = isolation == "namespaces"
        assert result.stdout == ("left one behind\n" if is_started else "")
        assert processes_of(mark) == []

    async def test_the_daemon_is_out_of_reach(self, isolation: Isolation) -> None:
        code = f"import os; os.kill({os.getpid()}, 0)"
        stderr = (await run(isolation, code)).stderr
        assert "ProcessLookupError" in stderr or "PermissionError" in stderr

    async def test_canceling_ends_the_program(
        self, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        running = asyncio.create_task(run(isolation, "import time; time.sleep(1000)"))
        await asyncio.to_thread(block_until, lambda: len(processes_of(str(tmp_path))) > 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert processes_of(str(tmp_path)) == []

    async def test_so_many_run_at_a_time(self, isolation: Isolation) -> None:
        sandbox = Sandbox(LIMITS, max_concurrent=1, isolation=isolation)
        code = "import time; print(time.monotonic()); time.sleep(0.2); print(time.monotonic())"
        results = await asyncio.gather(*(sandbox.run(code) for _ in range(3)))
        spans = sorted(tuple(map(float, result.stdout.split())) for result in results)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


class TestPrivileges:
    async def test_a_program_has_no_capabilities(
        self, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Root's too, which stays root where another user cannot reach the folder."""
        os.chmod(tmp_path, 0o700)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        code = (
            "for line in open('/proc/self/status'):\n"
            "    if line.startswith(('Cap', 'NoNew')): print(int(line.split()[1], 16), end=' ')\n"
            "import os; print(os.getuid())"
        )
        *sets, bounding, ambient, no_new, user = (await run(isolation, code)).stdout.split()
        assert ({*sets, ambient}, no_new) == ({"0"}, "1")
        assert user != "0" or bounding == "0"


@pytest.mark.skipif(find_isolation() != "namespaces", reason="this machine has no namespaces")
class TestNamespaces:
    async def test_the_file_system_is_read_only(self) -> None:
        code = (
            "import os\n"
            f"for path in ('/', '/usr/lib', '/proc', {tempfile.gettempdir()!r}, '.'):\n"
            "    print(bool(os.statvfs(path).f_flag & os.ST_RDONLY))"
        )
        assert (await run("namespaces", code)).stdout.split() == [*["True"] * 4, "False"]

    async def test_the_working_folder_may_be_below_a_private_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.chmod(tmp_path, 0o700)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        result = await run("namespaces", f"open('a', 'w'); open({str(tmp_path / 'b')!r}, 'w')")
        assert "Read-only file system" in result.stderr
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("memory", ["bytearray(size)", "mmap.mmap(-1, size)"])
    async def test_memory_of_all_processes_together_is_bounded(self, memory: str) -> None:
        code = (
            "import mmap, os, time\n"
            "size = 150 * 2**20\n"
            "for _ in range(8):\n"
            "    if not os.fork(): break\n"
            f"x = {memory}\n"
            "for place in range(0, size, 4096): x[place] = 1\n"
            "time.sleep(1000)\n"
        )
        result = await run("namespaces", code)
        assert result.is_out_of_memory
        assert "bytes of memory" in result.failure(LIMITS)

    async def test_the_folder_is_bounded(self) -> None:
        code = "for i in range(100): open(str(i), 'wb').write(bytes(2 * 2**20))"
        assert "No space left on device" in (await run("namespaces", code)).stderr

    async def test_a_new_namespace_is_refused(self) -> None:
        code = "import ctypes; print(ctypes.CDLL(None, use_errno=True).unshare(0x10000000))"
        assert (await run("namespaces", code)).stdout == "-1\n"
