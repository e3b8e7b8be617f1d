"""The buffer daemon, killed, on a full disk, restored from an older copy, and spoken to badly."""

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from buffers import messages as m
from buffers.audit import audit_journal
from buffers.connect import try_stats
from buffers.journal.sqlite import journal_path
from buffers.zmq import multipart
from buffers.zmq.client import ZmqBuffer
from buffers.zmq.server import POLL_S, ZmqBufferServer
from streamrl import wire
from streamrl.cli.main import main
from streamrl.config import load_config
from streamrl.curve import make_keys
from streamrl.errors import (
    PARENT_VARIABLE,
    ConfigError,
    CorruptMessageError,
    SchemaVersionError,
    StorageError,
    TransportError,
)
from streamrl.types import (
    Books,
    BufferStats,
    DropReason,
    RefusalReason,
    SchedulingState,
    pack,
)
from tests.contract.test_zmq import make_state, zmq_server
from tests.ports import free_port
from tests.records import damaged, fill, lease_one, make_group, make_status
from tests.waiting import DEADLINE_S, until

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
CONFIG = """
run: {{name: run, folder: {folder}}}
model: {{path: unused}}
data: {{source: addition}}
buffer: {{url: "{url}", max_staleness: 3, lease_ttl_s: 300, deadline_s: 120}}
learner: {{groups_per_step: 2}}
"""


class Daemon:
    """`streamrl buffer`, started and killed at will; at one port, unless it has another URL."""

    def __init__(self, folder: Path, url: str = "") -> None:
        self.url = url or f"zmq://127.0.0.1:{free_port()}"
        self.run = folder / "run"
        self.config = folder / "config.yaml"
        self.config.write_text(CONFIG.format(folder=folder, url=self.url))
        self.process: Any = None
        self._clients: list[ZmqBuffer] = []

    def start(self, *overrides: str) -> None:
        command = [STREAMRL, "buffer", str(self.config)]
        for override in overrides:
            command += ["--set", override]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def limit_files(self, num_bytes: int) -> None:
        """What a full disk does: a file cannot grow; -1 is no limit."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (num_bytes, -1))

    def client(self, deadline_s: float = DEADLINE_S) -> ZmqBuffer:
        """It is closed with the daemon."""
        self._clients.append(ZmqBuffer(self.url, deadline_s=deadline_s, retry_s=0.3))
        return self._clients[-1]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self.process is not None and self.process.poll() is None:
            self.kill()

    @property
    def log(self) -> str:
        return (self.run / "logs" / "buffer.log").read_text()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(tmp_path)
    daemon.start()
    yield daemon
    await daemon.close()


async def test_nobody_notices_that_a_buffer_was_killed(daemon: Daemon):
    generator, learner = daemon.client(), daemon.client()
    before = await learner.attach(0, None)
    await fill(generator, "s/a", "s/b", "s/c")
    held = await lease_one(generator, "s/d", "g", 0.0)
    loan = (await learner.take(2, 0, 1.0)).headers
    books = (await learner.stats()).books
    daemon.kill()
    daemon.start()
    after = await learner.stats()
    assert after.incarnation != before.incarnation
    assert after.books == books
    assert (await learner.take(2, 0, 1.0)).headers == loan
    assert [g.prompt_index for g in await learner.fetch([1, 0])] == [1, 0]
    assert (await learner.advance(1)).books.trained == 2
    assert audit_journal(journal_path(daemon.run)).faults == ()
    reply = await generator.heartbeat(make_status(lease_ids=("s/d",)))
    assert (reply.lost_lease_ids, reply.incarnation) == ((), after.incarnation)
    await generator.put("s/d", make_group(held.prompt_index, lease_id="s/d"))
    await learner.acknowledge(1)
    assert daemon.end() == 0
    assert audit_journal(journal_path(daemon.run)).faults == ()


async def test_every_answer_survives_a_kill_in_the_middle_of_many_calls(daemon: Daemon):
    """What a client was told stands, whenever the kill comes."""
    learner, generators = daemon.client(), [daemon.client() for _ in range(4)]
    await learner.attach(0, None)
    seen: list[int] = []

    async def generate(index: int) -> None:
        for number in range(10_000):
            lease = await lease_one(generators[index], f"{index}/{number}", str(index), 60.0)
            group = make_group(
                lease.prompt_index, lease_id=lease.lease_id, version=lease.min_policy_version
            )
            await generators[index].put(lease.lease_id, group)

    async def kill() -> None:
        for _ in range(3):
            step = len(seen)
            await until(lambda step=step: len(seen) >= step + 20)
            daemon.kill()
            daemon.start()

    tasks = [asyncio.create_task(generate(index)) for index in range(4)]
    killing = asyncio.create_task(kill())
    version = 0
    while not killing.done():
        headers = (await learner.take(2, version, DEADLINE_S)).headers
        seen.extend(g.prompt_index for g in await learner.fetch([h.prompt_index for h in headers]))
        version += 1
        await learner.advance(version)
        await learner.acknowledge(version)
    await killing
    assert seen == sorted(set(seen))
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The last one serves: before that it may not yet hear signals.
    await learner.stats()
    assert daemon.end() == 0
    assert audit_journal(journal_path(daemon.run)).faults == ()


async def test_on_a_full_disk_clients_wait_and_nothing_is_lost(daemon: Daemon):
    generator, learner, other = daemon.client(), daemon.client(), daemon.client(deadline_s=10.0)
    await learner.attach(0, None)
    leases = [await lease_one(generator, f"s/{i}", "g", 0.0) for i in range(4)]
    await generator.put("s/0", make_group(0, lease_id="s/0"))
    daemon.limit_files(journal_path(daemon.run).with_name("journal.sqlite-wal").stat().st_size)
    large = [make_group(i, lease_id=f"s/{i}", num_response=20_000) for i in (1, 2, 3)]
    waiting = [asyncio.create_task(generator.put(f"s/{i}", large[i - 1])) for i in (1, 2, 3)]
    await until(lambda: "nothing is taken in until it can be" in daemon.log)
    with pytest.raises(StorageError, match=r"journal .* cannot be written"):
        await lease_one(other, "t/0", "g", 0.0)
    assert not any(task.done() for task in waiting)
    stats = await learner.stats()
    assert stats.books.granted == 4
    assert "cannot be written" in stats.refusal
    daemon.limit_files(-1)
    await asyncio.gather(*waiting)
    assert (await learner.stats()).refusal == ""
    assert "the journal is written again" in daemon.log
    daemon.kill()
    daemon.start()
    headers = (await learner.take(4, 0, 5.0)).headers
    assert [h.prompt_index for h in headers] == [lease.prompt_index for lease in leases if lease]
    (group,) = await learner.fetch([2])
    assert group.num_tokens == large[1].num_tokens


async def test_a_buffer_that_is_told_to_end_on_a_full_disk_has_not_crashed(daemon: Daemon):
    client = daemon.client()
    await client.attach(0, None)
    daemon.limit_files(0)
    assert daemon.end() == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, where we may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill_up(disk: Path) -> Path:
    """The file that has the rest of it."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ballast


async def test_a_checkpoint_frees_a_file_system_that_groups_have_filled(disk: Path, daemon: Daemon):
    daemon.kill()
    daemon.start(f"run.folder={disk}")
    generator, learner = daemon.client(), daemon.client()
    await learner.attach(0, None)
    for index in range(3):
        await lease_one(generator, f"s/{index}", "g", 0.0)
    for index in range(2):
        group = make_group(index, lease_id=f"s/{index}", num_response=22_000)
        await generator.put(f"s/{index}", group)
    await learner.take(2, 0, 1.0)
    await learner.advance(1)
    group = make_group(2, lease_id="s/2", num_response=43_000)
    putting = asyncio.create_task(generator.put("s/2", group))
    async with asyncio.timeout(DEADLINE_S):
        while "No space left" not in (await learner.stats()).refusal:
            assert not putting.done()
    await learner.acknowledge(1)
    await putting
    daemon.kill()
    daemon.start(f"run.folder={disk}")
    books = (await learner.stats()).books
    assert (books.acknowledged, books.buffered, books.dropped) == (2, 1, {})
    daemon.kill()


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_buffer_started_on_a_full_disk_waits_for_space(
    disk: Path, daemon: Daemon, is_killed: bool
):
    """Killed, it has what SQLite needs to read its file; ended, it has not."""
    daemon.kill()
    daemon.start(f"run.folder={disk}")
    client = daemon.client()
    await client.attach(0, None)
    await fill(client, "s/a")
    if is_killed:
        daemon.kill()
    else:
        daemon.end()
    ballast = fill_up(disk)
    daemon.start(f"run.folder={disk}")
    stats, reason = await told(client)
    assert "journal.sqlite cannot be written" in (reason if stats is None else stats.refusal)
    assert daemon.process.poll() is None
    ballast.unlink()
    assert [h.prompt_index for h in (await client.take(1, 0, 10.0)).headers] == [0]
    daemon.kill()


async def told(client: ZmqBuffer) -> tuple[BufferStats | None, str]:
    """The stats of a buffer that is full, or why it gives none; waits until it says so."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            stats, reason = await try_stats(client)
            if "journal" in reason or (stats is not None and stats.refusal):
                return stats, reason


def test_a_daemon_that_cannot_write_its_configuration_leaves_none(disk: Path, tmp_path: Path):
    fill_up(disk)
    daemon = Daemon(tmp_path)
    command = [STREAMRL, "buffer", str(daemon.config), "--set", f"run.folder={disk}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"buffer: cannot write the run's folder {disk / 'run'}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not [*(disk / "run").glob("*config.yaml*")]


async def test_a_buffer_restored_from_an_older_copy_is_told_what_it_forgot(daemon: Daemon):
    generator, learner = daemon.client(), daemon.client()
    await learner.attach(0, Books())
    await fill(generator, "s/a", "s/b")
    copy = daemon.run.parent / "copy"
    daemon.kill()
    shutil.copytree(daemon.run / "buffer", copy)
    daemon.start()
    before = await generator.heartbeat(make_status())
    await learner.take(2, 0, 1.0)
    books = (await learner.advance(1)).books
    held = [await lease_one(generator, f"s/{name}", "g", 0.0) for name in "cd"]
    daemon.kill()
    shutil.rmtree(daemon.run / "buffer")
    shutil.copytree(copy, daemon.run / "buffer")
    daemon.start()
    reply = await generator.heartbeat(make_status(lease_ids=("s/c", "s/d")))
    assert reply.incarnation != before.incarnation
    assert reply.lost_lease_ids == ("s/c", "s/d")
    asserted = tuple(lease for lease in held if lease)
    reply = await generator.heartbeat(make_status(lease_ids=("s/c", "s/d"), held=asserted))
    assert reply.lost_lease_ids == ()
    stats = await learner.attach(1, books)
    assert (stats.books.leased, stats.books.balanced) == (2, True)
    for lease in asserted:
        await generator.put(lease.lease_id, make_group(lease.prompt_index, version=1))
    assert [h.prompt_index for h in (await learner.take(2, 1, 1.0)).headers] == [2, 3]
    assert daemon.end() == 0
    assert audit_journal(journal_path(daemon.run)).faults == ()


async def test_a_buffer_of_an_ended_run_waits_for_somebody_to_come(daemon: Daemon):
    learner = daemon.client()
    await learner.attach(0, None)
    daemon.kill()
    daemon.start()
    await learner.finish()
    assert await asyncio.to_thread(daemon.process.wait, DEADLINE_S) == 0
    daemon.start()
    stats = await learner.stats()
    assert (stats.finished, stats.is_over) == (True, False)
    assert not (await learner.heartbeat(make_status())).finished
    # Or the daemon might end before the learner attaches.
    await learner.heartbeat(make_status("stays"))
    await learner.heartbeat(make_status(is_leaving=True))
    assert not (await learner.attach(0, None)).finished


async def test_a_learner_that_is_killed_as_a_launch_ends_finds_the_buffer_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
):
    daemon.kill()
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getpid()))
    daemon.start()
    learner, again = daemon.client(), daemon.client()
    await learner.attach(0, None)
    await learner.finish()
    with pytest.raises(subprocess.TimeoutExpired):
        await asyncio.to_thread(daemon.process.wait, 2.0)
    await again.attach(0, None)
    await again.finish()
    assert daemon.end() == 0


@pytest.mark.parametrize("leaves", [True, False])
async def test_who_has_joined_a_launch_hears_of_its_end(tmp_path: Path, leaves: bool, zmq_client):
    """The launcher waits for its own generators only."""
    runs = threading.Event()
    clock = lambda: time.monotonic() if runs.is_set() else 0.0  # noqa: E731
    server = ZmqBufferServer(make_state(), "zmq://127.0.0.1:0", quarantine=tmp_path, clock=clock)
    stop = threading.Event()
    serving = asyncio.create_task(asyncio.to_thread(server.serve, stop))
    client = zmq_client(server.url)
    await client.attach(0, None)
    await client.heartbeat(make_status())
    await client.finish()
    stop.set()
    await asyncio.sleep(3 * POLL_S)
    assert not serving.done()
    assert (await client.heartbeat(make_status(is_leaving=leaves))).finished
    runs.set()
    await asyncio.wait_for(serving, DEADLINE_S)


def test_an_audit_of_nothing_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["buffer", "audit", str(tmp_path)]) == 2
    assert "is no run folder: it has no config.yaml" in capsys.readouterr().err


# Malformed input, through a real socket.


def packed(**changes: object) -> bytes:
    """A group's payload, its first trajectory changed past every check."""
    return wire.encode(pack(damaged(make_group(0, lease_id="s/a"), **changes)))


async def send(url: str, *frames: bytes) -> Any:
    """One message as a foreign program would send it."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(url.replace("zmq", "tcp"))
    await socket.send_multipart([b"id", *frames])
    _, reply = await asyncio.wait_for(socket.recv_multipart(), 120)
    socket.close(linger=0)
    return wire.decode(reply, m.Reply)


def of_schema(version: int, record: object) -> bytes:
    envelope = msgspec.msgpack.decode(wire.encode(record), type=tuple[int, int, msgspec.Raw])
    return msgspec.msgpack.encode((version, *envelope[1:]))


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (packed(behavior_logprobs=np.zeros(3, np.float32)), "CorruptMessageError"),
        (
            packed(behavior_logprobs=np.full(7, np.nan, np.float32)),
            "CorruptMessageError",
        ),
        (packed(reward=float("nan")), "CorruptMessageError"),
        (of_schema(99, pack(make_group(0))), "SchemaVersionError"),
        (packed()[:-5], "CorruptMessageError"),
        (b"", "CorruptMessageError"),
        (wire.encode(Books()), "CorruptMessageError"),
    ],
    ids=["lengths", "nan", "reward", "schema", "cut", "empty", "another record"],
)
async def test_a_malformed_group_ends_its_lease_once_and_is_kept(
    tmp_path, payload, kind, zmq_client
):
    with zmq_server(tmp_path, journal=True) as server:
        buffer = zmq_client(server.url)
        await buffer.attach(0, None)
        await lease_one(buffer, "s/a", "g", 0.0)
        request = wire.encode(m.PutRequest("s/a"))
        for _ in range(2):
            assert (await send(server.url, request, payload)).kind == kind
        stats = await buffer.stats()
        assert stats.books.dropped == {DropReason.MALFORMED: 1}
        assert stats.refused == {RefusalReason.MALFORMED: 1}
        assert stats.books.balanced
        kept = sorted((tmp_path / "quarantine").iterdir())
        assert [path.read_bytes() for path in kept] == [payload, payload]
        await fill(buffer, "s/b")


async def test_an_attach_that_is_sent_again_fences_nobody(tmp_path):
    with zmq_server(tmp_path) as server:
        first, second = (wire.encode(m.AttachRequest(0, None, name)) for name in ("a", "b"))
        replies = [await send(server.url, request) for request in (first, first, second, first)]
        assert [reply.learner_term for reply in replies] == [1, 1, 2, 1]


async def test_a_connection_made_while_a_request_could_not_be_sent_is_noticed(
    tmp_path, monkeypatch, zmq_client
):
    with zmq_server(tmp_path) as server:
        buffer = zmq_client(server.url, retry_s=60.0)
        await buffer.stats()
        send_now, refusals = multipart.send, iter([zmq.Again()])

        def send_later(*args: Any, **kwargs: Any) -> None:
            for refusal in refusals:
                raise refusal
            send_now(*args, **kwargs)

        # The descriptor told of the connection long ago, and does not tell again.
        monkeypatch.setattr(multipart, "send", send_later)
        async with asyncio.timeout(DEADLINE_S):
            assert (await buffer.stats()).books.balanced


async def test_a_malformed_request_is_refused_counted_and_kept(tmp_path, zmq_client):
    with zmq_server(tmp_path) as server:
        foreign = of_schema(99, m.PutRequest("s/a"))
        for message, error in ((b"nonsense", CorruptMessageError), (foreign, SchemaVersionError)):
            assert isinstance((await send(server.url, message)).exception(), error)
        buffer = zmq_client(server.url)
        assert (await buffer.stats()).refused == {RefusalReason.MALFORMED: 2}
        kept = sorted((tmp_path / "quarantine").iterdir())
        assert [path.read_bytes() for path in kept] == [b"nonsense", foreign]


# Keys.


async def test_with_keys_the_buffer_serves_who_has_them_and_nobody_else(tmp_path, zmq_client):
    keys, others = tmp_path / "keys", tmp_path / "others"
    assert main(["keys", "new", str(keys)]) == 0
    make_keys(others)
    assert {p.stat().st_mode & 0o777 for p in keys.iterdir()} == {0o600}
    half = tmp_path / "half"
    shutil.copytree(others, half)
    shutil.copy(keys / "server.public", half / "server.public")
    with zmq_server(tmp_path, curve=keys) as server:
        buffer = zmq_client(server.url, curve=keys)
        await buffer.attach(0, None)
        for wrong in (None, others, half):
            stranger = zmq_client(server.url, deadline_s=3.0, retry_s=0.3, curve=wrong)
            with pytest.raises(TransportError, match=r"refuses the keys .*buffer\.curve"):
                await stranger.stats()
        await fill(buffer, "s/a")
        assert (await buffer.stats()).books.buffered == 1


async def test_a_client_with_keys_gets_no_answer_from_a_buffer_without(tmp_path, zmq_client):
    make_keys(tmp_path / "keys")
    with zmq_server(tmp_path) as server:
        buffer = zmq_client(server.url, deadline_s=3.0, retry_s=0.3, curve=tmp_path / "keys")
        with pytest.raises(TransportError, match=r"or has none"):
            await buffer.stats()


def test_keys_are_not_written_over(tmp_path, capsys):
    assert main(["keys", "new", str(tmp_path)]) == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert main(["keys", "new", str(tmp_path)]) == 2
    assert "is not written over" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


async def test_without_keys_nobody_serves_or_connects_beyond_this_machine(tmp_path, zmq_client):
    url = "zmq://0.0.0.0:0"
    with pytest.raises(ConfigError, match="streamrl keys new FOLDER"), zmq_server(tmp_path, url):
        pass
    with pytest.raises(ConfigError, match="streamrl keys new FOLDER"):
        ZmqBuffer("zmq://10.0.0.1:5")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, url="zmq://0.0.0.0:5555"))
    with pytest.raises(ConfigError, match=r"buffer\.url: was 'zmq://0\.0\.0\.0:5555'.*keys new"):
        load_config(str(config))
    make_keys(tmp_path / "keys")
    with zmq_server(tmp_path, url, curve=tmp_path / "keys") as server:
        port = server.url.rpartition(":")[2]
        buffer = zmq_client(f"zmq://127.0.0.1:{port}", curve=tmp_path / "keys")
        assert (await buffer.stats()).books == Books()


def test_keys_that_are_missing_are_named(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"buffer\.curve: cannot read .*client\.public"),
        zmq_server(tmp_path, curve=tmp_path / "nowhere"),
    ):
        pass


async def test_a_client_of_another_run_is_refused_and_leases_nothing(tmp_path, zmq_client):
    with zmq_server(tmp_path, run_name="mine") as server:
        names = ("", "mine", "x")
        clients = {n: zmq_client(server.url, deadline_s=10.0, run_name=n) for n in names}
        other = clients["x"]
        for call in (
            other.heartbeat(make_status()),
            other.lease(("a",), "g", 0.0),
            other.attach(0, None),
            other.stats(),
            other.drain(),
            other.set_scheduling_state("g", SchedulingState.CORDONED),
        ):
            with pytest.raises(ConfigError, match="is of the run mine, and this run is x: give"):
                await call
        stats = await clients[""].stats()
        assert (stats.books.granted, stats.books.learner_term, stats.generators) == (0, 0, ())
        assert not stats.draining
        # A lease that waits for the learner is not that of a successor of its generator.
        await clients["mine"].heartbeat(make_status())
        waiting = asyncio.create_task(clients["mine"].lease(("a",), "g", 60.0))
        await asyncio.sleep(0.1)
        with pytest.raises(ConfigError, match="is of the run mine"):
            await other.heartbeat(make_status(session="another"))
        await clients["mine"].attach(0, None)
        assert len(await asyncio.wait_for(waiting, 120)) == 1
