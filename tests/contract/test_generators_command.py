"""`streamrl generators` and its commands, against a buffer that other processes reach."""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from buffers.connect import connect
from streamrl.cli.display.generators import generator_rows
from streamrl.cli.main import main
from streamrl.diagnosis.reading import HEARTBEAT_TIMEOUT_S
from streamrl.interfaces import TrajectoryBuffer
from streamrl.types import Books, BufferStats, OverduePolicy, SchedulingState
from tests.contract.limits_config import limits_config
from tests.contract.test_buffer_command import target_of
from tests.contract.test_buffer_limits import SHARED, serving
from tests.records import make_status


def ask(url: str, call: Callable[[TrajectoryBuffer], Any]) -> Any:
    async def asked() -> Any:
        buffer = connect(limits_config(url))
        try:
            return await call(buffer)
        finally:
            await buffer.close()

    return asyncio.run(asked())


@pytest.mark.parametrize("backend", SHARED)
def test_generators_are_listed_and_scheduled(backend: str, tmp_path: Path, capsys):
    with serving(backend, tmp_path) as url:
        target = target_of(url, tmp_path)
        held = {"lease_ids": ("quick/1",), "lease_ages_s": (12.5,), "tokens_per_s": 1234.4}
        held |= {"uptime_s": 50.0, "busy_s": 40.0, "pause_s": 1.0, "kv_usage": 0.25}
        ask(url, lambda buffer: buffer.attach(5, None))
        ask(url, lambda buffer: buffer.heartbeat(make_status("quick", policy_version=4, **held)))
        ask(url, lambda buffer: buffer.heartbeat(make_status("late", is_catching_up=True)))
        assert main(["generators", "cordon", target, "quick"]) == 0
        assert "quick is granted no leases" in capsys.readouterr().out
        assert main(["generators", target]) == 0
        table = capsys.readouterr().out.splitlines()
        assert table[0].split() == [
            *("generator", "state", "version", "behind", "leases", "oldest", "lease"),
            *("sequences", "tokens/s", "busy", "KV", "pause", "heartbeat"),
        ]
        assert table[1].startswith("late")
        assert "catching up" in table[1]
        assert table[2].split()[:-2] == [
            *("quick", "cordoned", "4", "1", "1", "12.5", "s", "0", "1234"),
            *("80", "%", "25", "%", "2", "%"),
        ]
        assert main(["generators", "uncordon", target, "quick"]) == 0
        assert main(["generators", target, "--json"]) == 0
        late, quick = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (late["id"], late["state"]) == ("late", "catching up")
        assert late["num_versions_behind"] == 5
        assert (quick["state"], quick["oldest_lease_s"]) == ("active", 12.5)
        assert main(["generators", "cordon", target, "quik"]) == 2
        assert "did you mean 'quick'?" in capsys.readouterr().err


@pytest.mark.parametrize("backend", SHARED)
def test_a_drain_waits_until_the_generator_has_left(backend: str, tmp_path: Path, capsys):
    with serving(backend, tmp_path) as url, ThreadPoolExecutor() as threads:
        target = target_of(url, tmp_path)
        ask(url, lambda buffer: buffer.heartbeat(make_status("g", lease_ids=("g/1",))))
        assert main(["generators", "drain", target, "g", "--deadline", "0"]) == 1
        output = capsys.readouterr().out
        assert "not drained within 0 s: g: draining, 1 leases" in output
        ask(url, lambda buffer: buffer.set_scheduling_state("g", SchedulingState.ACTIVE))
        draining = threads.submit(main, ["generators", "drain", target, "g"])
        deadline = time.monotonic() + 120
        while (
            ask(url, lambda b: b.heartbeat(make_status("g"))).scheduling_state
            is not SchedulingState.DRAINING
        ):
            assert time.monotonic() < deadline
        assert not draining.done()
        ask(url, lambda buffer: buffer.heartbeat(make_status("g", is_leaving=True)))
        assert draining.result(120) == 0
        assert "g has left" in capsys.readouterr().out


def stats(**fields: Any) -> BufferStats:
    known = {
        "policy_version": 0,
        "groups_per_step": 1,
        "max_staleness": 1,
        "staleness_bound": 1,
        "overdue": OverduePolicy.WAIT,
        "books": Books(),
    }
    return BufferStats(incarnation="i", **known, **fields)


def test_who_is_silent_or_away_is_listed_as_such():
    reading = stats(
        generators=(make_status("b"), make_status("a")),
        heartbeat_ages_s=(HEARTBEAT_TIMEOUT_S + 0.1, HEARTBEAT_TIMEOUT_S),
        scheduling_states={"b": SchedulingState.CORDONED, "c": SchedulingState.DRAINING},
    )
    found = [(row.id, row.state) for row in generator_rows(reading)]
    assert found == [("a", "active"), ("b", "cordoned, silent"), ("c", "draining, away")]
