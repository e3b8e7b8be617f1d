"""What is forked from the server is what would have been executed, and nothing depends on it."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.cli import launch
from streamrl.cli.main import main
from streamrl.cli.processes.command import call, executable
from streamrl.cli.processes.fork_server import Descriptors, ForkedProcess, ForkServer, forking
from streamrl.errors import PARENT_VARIABLE, ConfigError, ErrorPipe
from tests.ports import free_port
from tests.waiting import block_until

CONFIG = """
run: {{name: run, folder: {folder}}}
model: {{path: m}}
data: {{source: addition}}
buffer: {{url: "zmq://127.0.0.1:{port}"}}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with forking() as started:
        if started is None:
            pytest.skip("this machine has GPUs, or no pidfd: commands are executed")
        yield started


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path, port=free_port()))
    return file


def start_buffer(server: ForkServer, config: Path, pipe: ErrorPipe) -> ForkedProcess:
    command = [executable(), "buffer", "--config", str(config)]
    with (config.parent / "output").open("wb") as output:
        to = Descriptors(output.fileno(), output.fileno(), pipe.descriptor)
        environment = {**os.environ, **pipe.environment, "MARK": "1"}
        process = asyncio.run(server.fork(command, environment, to, asyncio.Event()))
    assert process is not None
    return process


def code(process: ForkedProcess) -> int:
    return asyncio.run(asyncio.wait_for(process.wait(), 120))


def test_a_forked_command_is_a_child_of_the_launcher_and_looks_like_an_executed_one(
    server: ForkServer, config: Path
):
    with ErrorPipe() as pipe:
        process = start_buffer(server, config, pipe)
        seen = psutil.Process(process.pid)
        assert seen.ppid() == os.getpid()
        assert [word for word in seen.cmdline() if word][1:] == ["buffer", "--config", str(config)]
        assert seen.name() == "streamrl"
        assert os.getsid(process.pid) == process.pid
        # By which a buffer finds the others of its launcher.
        assert seen.environ()[PARENT_VARIABLE] == str(os.getpid())
        log = config.parent / "run" / "logs" / "buffer.log"
        block_until(lambda: log.exists() and "serving" in log.read_text())
        assert "serving" in (config.parent / "output").read_text()
        process.send_signal(signal.SIGTERM)
        assert code(process) == 0
        assert code(process) == process.returncode == 0


def test_a_command_that_ends_copies_nothing_of_what_is_shared(server: ForkServer, config: Path):
    with ErrorPipe() as pipe:
        process = start_buffer(server, config, pipe)
        seen, log = psutil.Process(process.pid), config.parent / "run" / "logs" / "buffer.log"
        block_until(lambda: log.exists() and "serving" in log.read_text())
        process.send_signal(signal.SIGTERM)
        block_until(lambda: seen.status() == psutil.STATUS_ZOMBIE)
        # Its page faults, which map pages or copy them, outlive it until somebody waits for it.
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        touched_mib = int(fields[7]) * resource.getpagesize() / 2**20
        assert code(process) == 0
    # It touches about 50 MiB; the interpreter's own end would touch 180 more of what is shared.
    assert 0 < touched_mib < 120


async def codes_of_killed(process: ForkedProcess) -> list[int]:
    """For two that wait: whoever supervises it, and whoever has killed it."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.01)
    process.kill()
    return await asyncio.wait_for(asyncio.gather(process.wait(), process.wait()), 120)


def test_a_kill_is_its_exit_code(server: ForkServer, config: Path):
    with ErrorPipe() as pipe:
        process = start_buffer(server, config, pipe)
        assert asyncio.run(codes_of_killed(process)) == [-signal.SIGKILL] * 2
        assert pipe.read() is None


def test_a_forked_command_says_what_an_executed_one_says(server: ForkServer, tmp_path: Path):
    assert call("--version", fork_server=server) == call("--version")
    sentences = []
    for given in (server, None):
        with pytest.raises(ConfigError) as refused:
            call("evaluate", "--config", str(tmp_path / "none.yaml"), fork_server=given)
        sentences.append(str(refused.value))
    assert sentences[0] == sentences[1]
    assert "none.yaml" in sentences[0]


def test_without_a_server_the_command_is_executed():
    with forking() as server:
        if server is None:
            pytest.skip("commands are executed here")
        psutil.Process(server._process.pid).kill()
        server._process.wait()
        assert call("--version", fork_server=server) == call("--version")


def test_a_stop_does_not_wait_for_the_imports():
    async def stopped() -> ForkedProcess | None:
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, stopping.set)
        with ErrorPipe() as pipe:
            to = Descriptors(1, 2, pipe.descriptor)
            return await server.fork([executable(), "--version"], os.environ, to, stopping)

    with forking() as server:
        if server is None:
            pytest.skip("commands are executed here")
        os.kill(server._process.pid, signal.SIGSTOP)
        assert asyncio.run(stopped()) is None, "it is not ready before the stop"
        assert server._process.poll() is None


def test_the_server_ends_with_its_launcher():
    code = "from streamrl.cli.processes.fork_server import ForkServer; import time; "
    code += "s = ForkServer(); print(s._process.pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        server = psutil.Process(int(one.stdout.readline()))
        one.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        server.wait(120)


def test_a_machine_with_gpus_has_no_server(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(launch, "usable_devices", lambda: ("a GPU",))
    monkeypatch.setattr(launch, "require_startable", lambda _: None)
    monkeypatch.setattr(launch, "_launch", lambda *words: given.append(words[-1]) or 0)
    assert main(["launch", str(config)]) == 0
    assert given == [None]
