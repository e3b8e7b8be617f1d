"""Receivers that fail, stop answering or are slow, and a file system that is: the others go on."""

import asyncio
import errno
import struct
import threading
from typing import Any

import pytest

from streamrl.types import FilesEndpoint
from streamrl.weights import membership
from streamrl.weights.transports.files import FileSender
from tests.unit.weights.update_run import run
from tests.waiting import until


async def test_a_receiver_that_fails_does_not_keep_the_others_and_gets_the_next_chance(tmp_path):
    async with run(tmp_path, deadline_s=2) as started:
        good, _ = started.join("good")
        bad, _ = started.join("bad")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        bad.fails = True
        started.publish(1, 1.0)
        await until(lambda: good.has(1.0))
        assert bad.policy_version == 0
        bad.fails = False
        await until(lambda: bad.has(1.0))


async def test_a_receiver_that_stopped_answering_is_left_out_within_the_deadline(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(membership, "ALIVE_S", 1000.0)
    async with run(tmp_path, deadline_s=6) as started:
        good, _ = started.join("good")
        silent, task = started.join("silent")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        silent.receiver._send = lambda _: asyncio.sleep(0)  # no Ready, no Leave
        started.publish(1, 1.0)
        await until(lambda: good.has(1.0))
        assert started.sender.gauges()["num_receivers"] == 1
        task.cancel()


@pytest.mark.parametrize(
    "settings", [{"backend": "shared"}, {"transport": "files"}], ids=["shared", "files"]
)
async def test_who_reads_in_its_own_time_does_not_wait_for_one_that_stopped_answering(
    tmp_path, monkeypatch, settings
):
    monkeypatch.setattr(membership, "ALIVE_S", 1000.0)
    async with run(tmp_path, deadline_s=9, **settings) as started:
        good, _ = started.join("good")
        silent, task = started.join("silent")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        silent.receiver._send = lambda _: asyncio.sleep(0)  # no Loaded, no Leave
        started.publish(1, 1.0)
        await until(lambda: good.has(1.0))
        assert started.sender.gauges()["num_fenced"] == 0
        await until(lambda: started.sender.behind() == ("silent",))
        await until(lambda: started.sender.gauges()["num_fenced"] == 1)
        assert started.sender.gauges()["num_receivers"] == 1
        started.publish(2, 2.0)
        await until(lambda: good.has(2.0))
        task.cancel()


async def test_a_deadline_that_no_update_keeps_is_named_and_the_only_generator_gets_every_version(
    tmp_path,
):
    """It loads for longer than the deadline; the versions arrive all the same, and it is known for
    how long they take."""
    async with run(tmp_path, backend="shared", deadline_s=0.02) as started:
        generator, _ = started.join("slow")
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        for version in (1, 2, 3, 4):
            generator.open.clear()
            started.publish(version, float(version))
            await until(lambda v=version: generator.num_begun == v)
            await until(lambda v=version: started.sender.gauges()["num_fenced"] == v)
            generator.open.set()
            await until(lambda v=version: generator.has(float(v)))
            await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        (sentence,) = started.sender.left_out()
        assert sentence.startswith("slow has exceeded weights.deadline_s (0.02 s) for 4 updates")
        assert "set weights.deadline_s to 1" in sentence
        assert "others" not in sentence


async def test_who_is_slow_to_read_a_file_holds_up_nobody_and_may_be_replaced(tmp_path):
    async with run(tmp_path, transport="files", deadline_s=1000) as started:
        good, _ = started.join("good")
        slow, task = started.join("slow")
        slow.open.clear()
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        for version in (1, 2):
            started.publish(version, float(version))
            await until(lambda v=version: good.has(float(v)))
        assert (slow.num_begun, slow.policy_version) == (1, 0), "it is asked one thing at a time"
        slow.open.set()
        await until(lambda: slow.has(2.0))
        slow.open.clear()
        started.publish(3, 3.0)
        await until(lambda: slow.num_begun == 3)
        task.cancel()
        again, _ = started.join("slow")
        await until(lambda: again.has(3.0))


async def test_who_comes_an_update_later_gets_the_same_difference(tmp_path):
    async with run(tmp_path, transport="files", delta=True) as started:
        quick, _ = started.join("quick")
        late, _ = started.join("late")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        started.publish(1, 1.0)
        await until(lambda: quick.has(1.0) and late.has(1.0))
        late.open.clear()
        for version in (2, 3):
            started.publish(version, float(version))
            await until(lambda v=version: quick.has(float(v)))
        late.open.set()
        await until(lambda: late.has(3.0))
        paths = [[update.endpoint.path for update in g.updates] for g in (quick, late)]
        assert paths[0] == paths[1]
        assert [path.endswith(".delta.safetensors") for path in paths[0]] == [False, True, True]


async def test_a_file_system_that_is_full_or_stands_still_is_named_and_waited_for(
    tmp_path, monkeypatch, caplog
):
    async with run(tmp_path, transport="files", deadline_s=0.2) as started:
        write, may_write = FileSender.write, threading.Event()
        failures = iter([OSError(errno.ENOSPC, "No space left on device")])

        def write_late(*arguments: Any) -> dict[str, FilesEndpoint]:
            for failure in failures:
                raise failure
            may_write.wait()
            return write(*arguments)

        monkeypatch.setattr(FileSender, "write", write_late)
        generator, _ = started.join("a")
        await until(lambda: started.sender.gauges()["num_receivers"] == 1)
        started.publish(1, 1.0)
        await until(lambda: "cannot be written: [Errno 28] No space left" in caplog.text)
        await until(lambda: "its file is not written after" in caplog.text)
        may_write.set()
        await until(lambda: generator.has(1.0))


async def test_who_comes_late_gets_its_version_by_another_route_where_the_disk_is_full(
    tmp_path, monkeypatch
):
    def write(*_: Any) -> dict[str, FilesEndpoint]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSender, "write", write)
    async with run(tmp_path) as started:
        first, _ = started.join("first")
        started.publish(1, 1.0)
        await until(lambda: first.has(1.0))
        late, _ = started.join("late")
        await until(lambda: late.has(1.0))
        (sentence,) = started.sender.left_out()
        assert "file cannot be written: [Errno 28]" in sentence
        started.publish(2, 2.0)
        await until(lambda: late.has(2.0) and started.sender.left_out() == ())


async def test_a_file_that_was_tampered_with_is_refused_and_the_receiver_catches_up(
    tmp_path, caplog
):
    async with run(tmp_path, transport="files", deadline_s=2) as started:
        generator, _ = started.join("a")
        started.publish(1, 1.0)
        await until(lambda: generator.has(1.0))
        generator.open.clear()
        started.publish(2, 2.0)
        await until(lambda: generator.num_begun == 2)
        (newest,) = (path for path in tmp_path.iterdir() if "00000002" in path.name)
        data = newest.read_bytes()
        newest.write_bytes(data[:-4] + struct.pack("<f", 6.0))
        generator.open.set()
        await until(lambda: started.sender.gauges()["num_failed_loads"] == 1)
        assert generator.has(1.0)
        assert "a did not load version 2: checksum of norm from" in caplog.text
        await until(lambda: generator.has(2.0))
