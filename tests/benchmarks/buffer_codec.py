"""The least that any buffer of this language and these records does, for `bench_buffer`.

Groups are encoded by their producer, checked once on their way, and decoded by the learner, over
bare sockets in bare loops: no ledger, no leases, no event loop. What `zmq` lacks to this is the
price of its promises; what this lacks to the echo is the price of the records themselves.
"""

import time
from multiprocessing.synchronize import Barrier

import zmq

from buffers.zmq import multipart
from streamrl import service, wire
from streamrl.types import PackedGroup, TrajectoryGroup, pack

LEARNER = b"learner"
DONE = b""


def dealer(url: str, hello: bytes) -> "zmq.Socket[bytes]":
    """Connected, once the server has answered."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(url)
    socket.send(hello)
    socket.recv()
    return socket


def produce(
    url: str,
    group: TrajectoryGroup,
    count: int,
    in_flight: int,
    deadline_s: float,
    barrier: Barrier,
) -> None:
    """`count` groups, `in_flight` at a time; waits for the server's word on each."""
    socket = dealer(url, b"producer")
    barrier.wait(deadline_s)
    for number in range(count + in_flight):
        if number >= in_flight:
            socket.recv()
        if number < count:
            socket.send(wire.encode(pack(group)), copy=False)
    socket.close()


def serve(port: int) -> None:
    """Until killed: waits for a group, and forwards it to the learner."""
    service.keep_freed_memory()
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.set_hwm(0)
    router.bind(f"tcp://127.0.0.1:{port}")
    learner = b""
    while router.poll():
        while multipart.events(router) & multipart.READABLE:
            sender, frame = multipart.receive(router)
            payload = frame.buffer
            if payload in (LEARNER, b"producer"):
                learner = sender.bytes if payload == LEARNER else learner
            else:
                wire.decode(payload, PackedGroup)
                multipart.send(router, [learner, payload])
            multipart.send(router, [sender.bytes, DONE])


def learn(url: str, count: int, deadline_s: float, barrier: Barrier) -> float:
    """Seconds until `count` groups are decoded."""
    socket = dealer(url, LEARNER)
    barrier.wait(deadline_s)
    start = time.perf_counter()
    for _ in range(count):
        wire.decode(socket.recv(copy=False).buffer, PackedGroup).group()
    took = time.perf_counter() - start
    socket.close()
    return took
