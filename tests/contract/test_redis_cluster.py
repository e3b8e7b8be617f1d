"""A run in a real cluster: three masters and a replica, of our own, one of which is killed."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis
from redis.crc import key_slot

from buffers.redis.connection import namespace
from buffers.redis.journal_storage import forget, read_events
from streamrl.errors import ConfigError
from tests.contract.conftest import Connect
from tests.records import fill
from tests.redis_server import RedisServer
from tests.waiting import DEADLINE_S, block_until

RUN = "clustered"
NUM_SLOTS = 16384
THIRD = NUM_SLOTS // 3 + 1


class Cluster:
    """Three masters, and a replica of the one that holds the run."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.nodes = [RedisServer(folder / str(number)) for number in range(4)]
        for node in self.nodes:
            stack.callback(node.kill)
            node.start_node()
        self.admins = [Redis.from_url(node.url, decode_responses=True) for node in self.nodes]
        for number, admin in enumerate(self.admins[:3]):
            slots = range(number * THIRD, min((number + 1) * THIRD, NUM_SLOTS))
            admin.execute_command("CLUSTER", "ADDSLOTS", *slots)
        # As redis-cli does. Nodes that start with the same epoch settle it between themselves, and
        # a replica that has not heard of its master's new one is never elected in its place.
        for epoch, admin in enumerate(self.admins, start=1):
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node in self.nodes[1:]:
            self.admins[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        self.holder = key_slot(f"{namespace(RUN)}fence".encode()) // THIRD
        master = self.admins[self.holder].execute_command("CLUSTER", "MYID")
        block_until(lambda: master in self._nodes(3) and all(map(_is_ok, self.admins[:3])))
        self.admins[3].execute_command("CLUSTER", "REPLICATE", master)
        block_until(lambda: self.admins[3].info("replication").get("master_link_status") == "up")
        block_until(lambda: all(f"slave {master}" in self._nodes(number) for number in range(3)))

    def _nodes(self, number: int) -> str:
        return str(self.admins[number].execute_command("CLUSTER", "NODES"))

    def url(self, *numbers: int) -> str:
        hosts = (f"127.0.0.1:{self.nodes[number].port}" for number in numbers)
        return f"redis+cluster://{','.join(hosts)}"


def _is_ok(admin: "Redis") -> bool:
    return "cluster_state:ok" in str(admin.execute_command("CLUSTER", "INFO"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


async def test_a_run_lives_on_one_node_and_outlives_it(cluster: Cluster, redis_client: Connect):
    others = [number for number in range(3) if number != cluster.holder]
    learner = redis_client(cluster.url(*others), RUN)
    await learner.attach(0, None)
    generator = redis_client(cluster.url(others[1]), RUN)
    await fill(generator, "a", "b")
    keys = [set(admin.keys()) for admin in cluster.admins[:3]]
    assert keys[cluster.holder]
    assert not any(keys[number] for number in others)
    assert len((await learner.take(2, 0, 5.0)).headers) == 2
    assert cluster.admins[cluster.holder].wait(1, int(1000 * DEADLINE_S)) == 1

    cluster.nodes[cluster.holder].kill()
    await learner.advance(1)
    await fill(generator, "c", "d")
    assert len((await learner.take(2, 1, 5.0, with_payloads=True)).groups) == 2
    await learner.advance(2)
    await learner.acknowledge(2)
    books = (await learner.stats()).books
    assert books.balanced
    assert books.acknowledged == 4
    assert cluster.admins[3].info("replication")["role"] == "master"
    events = [event.state async for event in read_events(cluster.url(*others), RUN)]
    assert events.count("acknowledged") == 4
    assert await forget(cluster.url(*others), RUN) > 0
    assert not cluster.admins[3].keys()


async def test_a_node_that_does_not_hold_the_run_is_refused_by_a_url_of_one_server(
    cluster: Cluster, redis_client: Connect
):
    other = next(number for number in range(3) if number != cluster.holder)
    with pytest.raises(ConfigError, match=r"does not hold the run .* redis\+cluster://host:port"):
        await redis_client(cluster.nodes[other].url, RUN).stats()
