"""How long a version takes to reach all generators: by a broadcast, by a chain, by files.

A gloo broadcast is a binomial tree, in which the learner sends each byte once for each level. In a
chain, which StreamRL does not have, each generator passes on what it receives, piece by piece. From
a file system everyone reads at once what it gives to all together; an object store gives each its
own link. The links are what the sums are of; what `measure_forming` measures on one machine is what
the members of a broadcast need before the first byte: each has a connection to each other one.
"""

import math
import threading
import time
import uuid
from collections.abc import Callable

from msgspec import Struct

from streamrl.types import BroadcastEndpoint
from streamrl.weights.transports import groups

FORMED = (16, 32, 64, 128)
PIECE = 4 * 2**20
LATENCY_S = 0.0002


class Forming(Struct, frozen=True, kw_only=True):
    """`member_s`: seconds of CPU of a member for each other one. `address_bytes`: what each needs
    for each other one; gloo reads the addresses of all for all, so the sender sends n^3 of them."""

    member_s: float
    address_bytes: float

    def seconds(self, count: int, link: float) -> float:
        """Until a group of so many has formed, each on a machine with a link of so many bytes/s."""
        return self.member_s * count + self.address_bytes * count**3 / link

    def limit(self, deadline_s: float, link: float) -> int:
        """The most members whose group forms before the deadline."""
        sizes = range(2, 2**20)
        return next(count for count in sizes if self.seconds(count, link) > deadline_s) - 1


def measure_forming() -> Forming:
    """By groups of threads of this process; takes some seconds."""
    formed = {count: _form(count) for count in FORMED}
    return Forming(
        member_s=min(took_s / count**2 for count, (took_s, _) in formed.items()),
        address_bytes=min(num_bytes / count**2 for count, (_, num_bytes) in formed.items()),
    )


def _form(count: int) -> tuple[float, int]:
    """Seconds of CPU, and the bytes that each member was told."""
    server, name = groups.RendezvousServer("127.0.0.1"), uuid.uuid4().hex
    joined: list[groups.BroadcastGroup] = []

    def join(rank: int) -> None:
        endpoint = BroadcastEndpoint(
            host="127.0.0.1",
            port=server.port,
            group=name,
            rank=rank,
            world_size=count,
            backend="gloo",
            bucket_bytes=PIECE,
            timeout_s=60.0,
            key=server.key,
            verify=False,
        )
        joined.append(groups.join(endpoint))

    began_s = time.process_time()
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s, num_bytes = time.process_time() - began_s, sum(map(len, server._values.values()))
    for group in joined:
        group.close()
    server.close()
    assert len(joined) == count, "a group did not form"
    return took_s, num_bytes


class Transfer(Struct, frozen=True, kw_only=True):
    """Bytes of a version; bytes/s of each machine's link, and of a file system for all together."""

    num_bytes: float
    link: float
    file_system: float

    def seconds(self) -> dict[str, Callable[[int], float]]:
        """By way, for a number of generators."""
        once_s = self.num_bytes / self.link
        hop_s = PIECE / self.link + LATENCY_S
        return {
            "broadcast": lambda n: once_s * math.ceil(math.log2(n + 1)),
            "chain": lambda n: once_s + (n - 1) * hop_s,
            "file system": lambda n: once_s + max(once_s, n * self.num_bytes / self.file_system),
            "object store": lambda n: 2 * once_s,
        }
