"""A rank that ends or freezes is named by the others, which end; one that parts is not missed."""

import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from learners.executor import liveness
from learners.executor.liveness import Liveness
from streamrl.errors import EXIT_UNREACHABLE, TransportError
from tests.waiting import block_until

DEADLINE_S = 120.0


class Exits:
    """What would have ended this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code: int | None = None
        self.called = threading.Event()
        monkeypatch.setattr(liveness, "BEAT_S", 0.02)
        monkeypatch.setattr(liveness, "GRACE_S", 0.05)
        monkeypatch.setattr("learners.executor.liveness.os._exit", self.exit)

    def exit(self, code: int) -> None:
        self.code = code
        self.called.set()


@pytest.fixture
def exits(monkeypatch):
    return Exits(monkeypatch)


def watching(store: dist.Store, rank: int, deadline_s: float = DEADLINE_S) -> Liveness:
    watched = Liveness(store, rank, 2, deadline_s)
    watched.start()
    return watched


def failed_collective(watched: Liveness) -> None:
    with watched.explained():
        raise RuntimeError("Connection closed by peer")


def test_a_process_that_ended_is_named_and_ends_this_one(exits):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store = dist.HashStore()
    store.set(liveness._key(1), f"{liveness.this_pid_namespace()} {ended.pid} 7")
    watched = watching(store, 0)
    sentence = rf"^rank 1 of the learner \(process {ended.pid}\) has ended$"
    with pytest.raises(TransportError, match=sentence):
        failed_collective(watched)
    assert exits.called.wait(DEADLINE_S)
    assert exits.code == EXIT_UNREACHABLE


FAILS_AT_ONCE = """
import os, sys
from torch._C._distributed_c10d import TCPStore
from learners.executor.liveness import Liveness

Liveness(TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), 1, 2).start()
os._exit(2)
"""


def test_a_rank_that_fails_as_soon_as_it_has_joined_is_named(exits):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-c", FAILS_AT_ONCE, str(store.port)]
    assert subprocess.run(words, check=False).returncode == 2
    watched = watching(store, 0)
    with pytest.raises(TransportError, match=r"^rank 1 of the learner .* has ended$"):
        failed_collective(watched)
    assert exits.called.wait(DEADLINE_S)


async def test_a_rank_of_another_machine_is_lost_when_its_beat_stands_still(exits):
    store = dist.HashStore()
    store.set(liveness._key(1), "elsewhere 1 7")
    watched = watching(store, 0, deadline_s=0.2)
    sentence = r"^rank 1 of the learner has not reported for (\d+) s$"
    with pytest.raises(TransportError, match=sentence) as caught:
        await watched.watch()
    (silent_s,) = re.findall(sentence, str(caught.value))
    assert int(silent_s) < DEADLINE_S
    assert exits.called.wait(DEADLINE_S)


def test_a_process_that_stood_still_misses_nobody_for_it(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: now_s))
    store = dist.HashStore()
    store.set(liveness._key(1), "elsewhere 1 7")
    watched = Liveness(store, 0, 2, deadline_s=10.0)
    assert not watched._beat(1)
    now_s = 1000.0
    assert not watched._beat(2)
    now_s = 1004.0
    assert not watched._beat(3)
    now_s = 1008.0
    assert not watched._beat(4)
    now_s = 1012.0
    assert watched._beat(5) == "rank 1 of the learner has not reported for 12 s"


def test_ranks_that_beat_or_have_parted_are_not_missed(exits):
    store = dist.HashStore()
    first, second = (watching(store, rank, deadline_s=2.0) for rank in (0, 1))

    def beats(rank: int) -> int:
        return int(store.get(liveness._key(rank)).split()[-1])

    block_until(lambda: beats(1) >= 110, DEADLINE_S / 2)
    second.stop()
    before = beats(0)
    block_until(lambda: beats(0) >= before + 110, DEADLINE_S / 2)
    first.stop()
    assert exits.code is None


def test_an_error_of_the_program_is_not_explained_by_the_ranks(exits):
    watched = watching(dist.HashStore(), 0)
    with pytest.raises(ValueError, match="own mistake"), watched.explained():
        raise ValueError("own mistake")
    watched.stop()
