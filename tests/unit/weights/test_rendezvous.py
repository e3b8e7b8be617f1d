"""Where the members of a gloo group meet: open to who knows the key, closed to others."""

import asyncio
import math
import os
import socket
import threading
import time

import psutil
import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import BroadcastEndpoint, replace
from streamrl.weights.transports import groups
from streamrl.weights.transports.broadcast import BroadcastSender
from streamrl.weights.transports.groups import RendezvousServer, RendezvousStore


@pytest.fixture
def server():
    made = RendezvousServer("127.0.0.1")
    yield made
    made.close()


def endpoint(server: RendezvousServer, **fields: object) -> BroadcastEndpoint:
    known = BroadcastEndpoint(
        host="127.0.0.1",
        port=server.port,
        group="g",
        rank=0,
        world_size=2,
        backend="gloo",
        bucket_bytes=600,
        timeout_s=60.0,
        key=server.key,
    )
    return replace(known, **fields)


def test_who_knows_the_key_reads_what_others_put_and_waits_for_it(server):
    one, two = (RendezvousStore("127.0.0.1", server.port, server.key, 5.0) for _ in range(2))
    one.set("a", b"1")
    assert two.get("a") == b"1"
    two._timeout_s = 0.1
    with pytest.raises(RuntimeError, match=r"no answer .* to FetchKey b for 0\.1 s"):
        two.wait(["a", "b"])
    one.close()
    two.close()


def test_who_does_not_know_it_gets_no_answer(server):
    other = RendezvousServer("127.0.0.1")
    stranger = RendezvousStore("127.0.0.1", server.port, other.key, 0.3)
    with pytest.raises(RuntimeError, match="no answer"):
        stranger.set("a", b"mine")
    stranger.close()
    other.close()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"\xff" * 100)
    member = RendezvousStore("127.0.0.1", server.port, server.key, 5.0)
    member.set("b", b"2")
    assert member._values == {"b": b"2"}
    member.close()


async def test_two_members_broadcast_and_a_third_place_is_waited_for_until_the_timeout(server):
    joining = (asyncio.to_thread(groups.join, endpoint(server, rank=rank)) for rank in range(2))
    first, second = await asyncio.gather(*joining)
    sent, got = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    await asyncio.gather(
        asyncio.to_thread(first.broadcast, sent), asyncio.to_thread(second.broadcast, got)
    )
    assert torch.equal(sent, got)
    first.close()
    second.close()
    start = time.monotonic()
    with pytest.raises(WeightTransferError, match="group other did not form: no answer"):
        groups.join(endpoint(server, group="other", timeout_s=0.3))
    assert time.monotonic() - start < 60


def test_a_network_that_is_away_fails_the_update_alone(server, monkeypatch):
    def unreachable(host: str) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(groups, "address_towards", unreachable)
    with pytest.raises(WeightTransferError, match=r"group g did not form: .*is unreachable"):
        groups.join(endpoint(server))


def test_nobody_listens_beyond_the_address():
    sender = BroadcastSender(WeightSettings(), "127.0.0.1", torch.device("cpu"))
    made = [sender.endpoints({"a": 1}, backend, verify=False)["a"] for backend in ("gloo", "nccl")]
    ports = {connection.laddr for connection in psutil.Process().net_connections("tcp")}
    assert {ip for ip, port in ports if port in {known.port for known in made}} == {"127.0.0.1"}
    assert [bool(known.key) for known in made] == [True, False]
    TCPStore("127.0.0.1", made[1].port, is_master=False, wait_for_workers=False)
    sender.close()


class GpuWork:
    """A broadcast of NCCL, whose `wait` is one of the GPU."""

    def __init__(self, num_polls: float) -> None:
        self.polls_left = num_polls

    def is_completed(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0

    def wait(self) -> None:
        pass


def test_a_broadcast_between_gpus_is_over_when_wait_returns() -> None:
    work = GpuWork(3)
    groups.Broadcast(work, 60.0).wait()
    assert work.polls_left < 0
    with pytest.raises(WeightTransferError, match="too slow"):
        groups.Broadcast(GpuWork(math.inf), 0.01).wait()


CPU = torch.device("cpu")


class Nccl:
    """In place of torch's group, which needs a GPU."""

    class Options:
        _timeout = None

    def __init__(self, store: Store, rank: int, world_size: int, options: Options) -> None:
        self.is_unwatched = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
        self.is_aborted = False
        self.connected: list[torch.device] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def abort(self) -> None:
        self.is_aborted = True
        raise RuntimeError("it hangs")


async def test_a_group_of_nccl_that_fails_ends_neither_the_process_nor_a_close(monkeypatch):
    """torch's watching thread would end the process, and its `shutdown` wait for lost peers."""
    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", Nccl, raising=False)
    store = groups.OpenStore("127.0.0.1", 5.0)
    other = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    joined = await asyncio.gather(
        asyncio.to_thread(store.join, "g", 2, "nccl", 5.0),
        asyncio.to_thread(groups._nccl, PrefixStore("g", other), 1, 2, 5.0, CPU),
    )
    made = [joined[0]._group, joined[1]]
    assert all(one.is_unwatched and one.connected == [CPU] for one in made)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    joined[0].close()
    assert made[0].is_aborted


def test_a_rank_that_does_not_come_to_a_group_of_nccl_is_waited_for_until_the_timeout(monkeypatch):
    """In a broadcast NCCL would wait for it for ever."""
    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", Nccl, raising=False)
    store = groups.OpenStore("127.0.0.1", 5.0)
    with pytest.raises(WeightTransferError, match="group g did not form"):
        store.join("g", 2, "nccl", 0.2)


def test_a_network_that_nccl_cannot_use_is_an_error_in_time(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(Nccl, "eager_connect_single_device", lambda *_: released.wait())
    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", Nccl, raising=False)
    store = groups.OpenStore("127.0.0.1", 5.0)
    with pytest.raises(WeightTransferError, match=r"NCCL has not connected .* in 0\.\d s"):
        store.join("g", 1, "nccl", 0.2)
    released.set()
