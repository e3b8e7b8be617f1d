"""Weights in memory that both ends map: what is read is what was written, or it is refused."""

import gc
import mmap
import multiprocessing
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch

from streamrl.errors import WeightTransferError
from streamrl.types import CudaMemory, HostMemory, SharedEndpoint, replace
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.locality import this_host
from streamrl.weights.transports import shared_memory as memory
from streamrl.weights.transports.shared_memory import SendBuffers, SharedReader, receive_descriptor

SHAPES = {"embed": (50, 8), "head": (8, 50), "norm": (8,), "wide": (3000,)}
KEY = b"k" * 40
TOO_LATE = "overwritten the version before it was read"


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


LAYOUT = Layout(manifest_of(parameters(0.0)), 600)


class Learner:
    """Send buffers, and an endpoint for what they hold."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        self.buffers = SendBuffers(layout, "cpu")

    def write(self, version: int) -> None:
        self.buffers.write(parameters(float(version)), version)

    def endpoint(self, *, verify: bool = False) -> SharedEndpoint:
        with self.buffers.reading() as held:
            assert held is not None
            return self.buffers.endpoint(held, KEY if verify else None)

    def publish(self, version: int, *, verify: bool = False) -> SharedEndpoint:
        self.write(version)
        return self.endpoint(verify=verify)


def read(
    reader: SharedReader, endpoint: SharedEndpoint, landing: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """As vLLM's workers do: what was announced has been JSON in between."""
    known = msgspec.json.decode(msgspec.json.encode(endpoint), type=SharedEndpoint)
    return {name: tensor.clone() for name, tensor in reader.tensors(known, LAYOUT, landing, KEY)}


def is_version(weights: Mapping[str, torch.Tensor], version: int) -> bool:
    return weights.keys() == SHAPES.keys() and all(
        bool((t == version).all()) for t in weights.values()
    )


@pytest.mark.parametrize("verify", [False, True], ids=["", "verify"])
@pytest.mark.parametrize("in_place", [False, True], ids=["views", "in place"])
def test_every_version_is_read_from_memory_that_is_mapped_once(in_place, verify, monkeypatch):
    opened: list[HostMemory] = []
    open_memory = memory.open_memory
    monkeypatch.setattr(memory, "open_memory", lambda one: opened.append(one) or open_memory(one))
    learner, reader = Learner(), SharedReader()
    landing = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) if in_place else None
    for version in range(1, 6):
        weights = read(reader, learner.publish(version, verify=verify), landing)
        assert is_version(weights, version)
        if landing is not None:
            landed = {slot.spec.name: slot.read(slot.of(landing)) for slot in LAYOUT.slots}
            assert is_version(landed, version)
    assert len(opened) == 1
    again = Learner()
    assert is_version(read(reader, again.publish(7), landing), 7)
    assert opened[1:] == [again.buffers.exported[0]]
    assert list(reader._mapped) == opened[1:], "what is not used any more is given back"


@pytest.mark.parametrize("num_writes", range(4))
@pytest.mark.parametrize("num_read", range(len(SHAPES) + 1))
def test_what_was_overwritten_while_it_was_read_is_refused_and_nothing_else(num_read, num_writes):
    learner, reader = Learner(), SharedReader()
    arriving = reader.tensors(learner.publish(1), LAYOUT, None, KEY)
    weights = {}
    for _ in range(num_read):
        name, tensor = next(arriving)
        weights[name] = tensor.clone()
    for version in range(2, 2 + num_writes):
        learner.write(version)
    if num_writes < 2:
        assert is_version({**weights, **{n: t.clone() for n, t in arriving}}, 1)
    else:
        with pytest.raises(WeightTransferError, match=TOO_LATE):
            list(arriving)
    newest = 1 + num_writes
    assert is_version(read(reader, learner.endpoint()), newest)


def test_a_version_that_is_being_read_is_not_overwritten():
    learner, reader = Learner(), SharedReader()
    learner.write(1)
    with learner.buffers.reading() as held:
        endpoint = learner.buffers.endpoint(held, None)
        arriving = reader.tensors(endpoint, LAYOUT, None, KEY)
        first, tensor = next(arriving)
        weights = {first: tensor.clone()}
        for version in (2, 3, 4):
            learner.write(version)
        assert is_version({**weights, **{n: t.clone() for n, t in arriving}}, 1)
    assert is_version(read(reader, learner.endpoint()), 4)


class Interrupting(Mapping[str, torch.Tensor]):
    """Parameters whose third one is asked for when a reader has its turn."""

    def __init__(self, value: float, turn) -> None:
        self._parameters, self._turn = parameters(value), turn

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == [*SHAPES][2]:
            self._turn()
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def test_a_write_that_is_under_way_is_seen_from_its_first_byte():
    learner, reader = Learner(), SharedReader()
    endpoint = learner.publish(1)
    learner.write(2)
    refused = []

    def late() -> None:
        with pytest.raises(WeightTransferError, match=TOO_LATE):
            read(reader, endpoint)
        assert is_version(read(reader, learner.endpoint()), 2)
        refused.append(True)

    learner.buffers.write(Interrupting(3.0, late), 3)
    assert refused
    assert is_version(read(reader, learner.endpoint()), 3)


def test_a_wrong_bit_is_named():
    learner, reader = Learner(), SharedReader()
    endpoint = learner.publish(1, verify=True)
    with learner.buffers.reading() as held:
        LAYOUT.slots[1].of(held.data)[5] ^= 1
    with pytest.raises(WeightTransferError, match="checksum of head from the sender is not"):
        read(reader, endpoint)


def write_from_elsewhere(known: str, to: Connection) -> None:
    """Another process of the same user."""
    outcomes = []
    path = f"/proc/self/fd/{receive_descriptor(known)}"
    outcomes.append(oct(stat.S_IMODE(os.stat(path).st_mode)))
    for attempt in (_write_file, _write_mapped, lambda path: os.truncate(path, 1)):
        try:
            attempt(path)
            outcomes.append("changed")
        except OSError as error:
            outcomes.append(type(error).__name__)
    to.send(outcomes)


def _write_file(path: str) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(b"forged")


def _write_mapped(path: str) -> None:
    with open(path, "r+b", buffering=0) as file:
        mmap.mmap(file.fileno(), 0)[0] = 1


def test_no_other_process_can_change_what_is_shared():
    learner, reader = Learner(), SharedReader()
    endpoint = learner.publish(1)
    known = endpoint.stamps.socket
    assert stat.S_IMODE(os.stat(known).st_mode) == 0o600
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=write_from_elsewhere, args=(known, there))
    process.start()
    assert here.poll(60)
    assert here.recv() == ["0o600"] + ["PermissionError"] * 3
    process.join()
    assert is_version(read(reader, endpoint), 1)
    assert is_version(read(reader, learner.publish(2)), 2)


def test_an_endpoint_beyond_the_memory_is_refused():
    learner = Learner()
    endpoint = learner.publish(1)
    for wrong in (replace(endpoint, start=2**40), replace(endpoint, stamp_at=2**40)):
        with pytest.raises(WeightTransferError, match="of the memory"):
            read(SharedReader(), wrong)


def test_a_reader_that_writes_changes_nobody_elses_weights():
    learner = Learner()
    endpoint = learner.publish(1)
    for _, tensor in SharedReader().tensors(endpoint, LAYOUT, None, KEY):
        tensor.fill_(9.0)
    assert is_version(read(SharedReader(), endpoint), 1)


def test_memory_that_is_another_one_by_now_is_refused():
    endpoint = Learner().publish(1)
    other = SendBuffers(Layout(manifest_of(parameters(0.0)), 300), "cpu")
    assert other.exported is not None
    theirs = replace(endpoint.stamps, socket=other.exported[0].socket)
    wrong = replace(endpoint, memory=theirs, stamps=theirs)
    with pytest.raises(WeightTransferError, match="another file is there"):
        read(SharedReader(), wrong)
    gone = replace(endpoint.stamps, socket="/dev/shm/streamrl-weights-gone.socket")
    with pytest.raises(WeightTransferError, match="needs learner and generators on one machine"):
        read(SharedReader(), replace(endpoint, memory=gone, stamps=gone))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in which names of sockets are short enough."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("silent", [False, True], ids=["no descriptor", "silent"])
def test_a_socket_that_gives_no_memory_is_refused(silent, short_path, monkeypatch):
    monkeypatch.setattr(memory, "_WAIT_S", 0.05 if silent else 30.0)
    endpoint = Learner().publish(1)
    path = str(short_path / "socket")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(path)
        stranger.listen()

        def hang_up() -> None:
            connection, _ = stranger.accept()
            connection.close()

        thread = threading.Thread(target=hang_up)
        if not silent:
            thread.start()
        theirs = replace(endpoint.stamps, socket=path)
        wrong = replace(endpoint, memory=theirs, stamps=theirs)
        expected = "timed out" if silent else "its process gives no file"
        with pytest.raises(WeightTransferError, match=expected):
            read(SharedReader(), wrong)
        if not silent:
            thread.join()


def test_names_of_killed_processes_are_removed_and_no_others(short_path, monkeypatch):
    monkeypatch.setattr(memory, "SHARED_FOLDER", short_path)

    def name(number: int) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(short_path / f"streamrl-weights-{number}.socket"))
        made.listen()
        return made

    alive = name(1)
    name(2).close()
    (short_path / "other").touch()
    learner = Learner()
    assert learner.buffers.exported is not None
    own = Path(learner.buffers.exported[0].socket).name
    left = {path.name for path in short_path.iterdir()}
    assert left == {"streamrl-weights-1.socket", "other", own}
    alive.close()
    del learner
    gc.collect()
    assert not (short_path / own).exists()


def test_without_a_folder_to_share_there_are_ordinary_send_buffers(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SHARED_FOLDER", tmp_path / "none")
    assert Learner().buffers.exported is None


def test_memory_of_a_gpu_that_this_process_does_not_see_is_refused():
    learner = Learner()
    elsewhere = CudaMemory(
        gpu="GPU of the learner",
        handle=b"",
        num_bytes=1,
        offset=0,
        counter=b"",
        counter_offset=0,
        event=b"",
        waits_for_event=False,
    )
    with pytest.raises(WeightTransferError, match="GPU of the learner is not one of this process"):
        read(SharedReader(), replace(learner.publish(1), memory=elsewhere))


def test_the_descriptor_is_closed_with_the_buffers_and_the_bytes_stay_for_who_reads_them():
    gc.collect()  # What other tests left open would be closed below.
    learner, reader = Learner(), SharedReader()
    endpoint = learner.publish(1)
    path = endpoint.stamps.socket
    num_open = len(os.listdir("/proc/self/fd"))
    arriving = reader.tensors(endpoint, LAYOUT, None, KEY)
    _, first = next(arriving)
    del learner
    gc.collect()
    assert not os.path.exists(path)
    assert len(os.listdir("/proc/self/fd")) == num_open - 2
    assert (first == 1.0).all()
    with pytest.raises(WeightTransferError, match="cannot be opened here"):
        list(arriving)


def test_a_system_without_such_memory_has_ordinary_send_buffers(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    buffers = SendBuffers(LAYOUT, "cpu")
    assert buffers.exported is None
    buffers.write(parameters(2.0), 2)
    with buffers.reading() as held:
        assert is_version({s.spec.name: s.read(s.of(held.data)) for s in LAYOUT.slots}, 2)


def learn(pipe: Connection) -> None:
    """A learner's process: publishes one version, and lives until it is killed."""
    learner = Learner()
    pipe.send_bytes(msgspec.json.encode((this_host(), learner.publish(1))))
    pipe.recv_bytes()


def test_a_learner_that_is_killed_while_it_is_read_is_noticed_at_the_last_byte():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=learn, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    host, endpoint = msgspec.json.decode(ours.recv_bytes(), type=tuple[str, SharedEndpoint])
    assert host == this_host() != ""
    reader = SharedReader()
    assert is_version(read(reader, endpoint), 1)
    arriving = reader.tensors(endpoint, LAYOUT, None, KEY)
    name, tensor = next(arriving)
    process.kill()
    process.join()
    assert (tensor == 1.0).all(), f"{name} can still be read"
    with pytest.raises(WeightTransferError, match=r"memory at /dev/shm/\S+ cannot be opened"):
        list(arriving)
