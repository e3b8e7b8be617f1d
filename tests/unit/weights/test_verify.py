"""Checksums of a broadcast, and broadcasts that end before their time. Real sockets and groups."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from actors.engines.hf.engine import SpareWeights
from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import LoadReport, WeightUpdate, replace
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.sender import WeightSender
from streamrl.weights.transports import groups
from streamrl.weights.transports.broadcast import BroadcastReceiver, BroadcastSender
from streamrl.weights.transports.receive import TransferReceiver

SHAPES = {"embed": (50, 8), "head": (8, 50), "norm": (8,)}
BUCKET_BYTES = 600
KEY = b"k" * 40


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


class Flawed(BroadcastReceiver):
    """Gets one wrong bit in the second bucket while `is_flawed`."""

    is_flawed = True

    def _join(self, endpoint):
        group = super()._join(endpoint)
        if self.is_flawed:
            return FlawedGroup(group)
        return group


class FlawedGroup:
    def __init__(self, group: groups.BroadcastGroup) -> None:
        self._group = group

    def pipelined(self, tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        for number, tensor in enumerate(self._group.pipelined(tensors)):
            if number == 1:
                tensor[100] ^= 1
            yield tensor


class Engine:
    """Stages and swaps as the HF engine does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = torch.nn.ParameterDict(parameters(0.0)).to(dtype)
        self.flawed = Flawed(torch.device("cpu"))
        self.transfer = TransferReceiver()
        self.transfer._broadcast = self.flawed
        self._spare = SpareWeights(self.model)

    async def load(self, update: WeightUpdate) -> LoadReport:
        await asyncio.to_thread(self._receive, update)
        self._spare.swap()
        return LoadReport(transfer_s=0.25, load_s=0.125, pause_s=0.0625)

    def _receive(self, update: WeightUpdate) -> None:
        landing = self._spare.landing(update.manifest)
        self._spare.stage(self.transfer.tensors(update, landing))

    def has(self, value: float) -> bool:
        return all((parameter == value).all() for parameter in self.model.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["in place", "cast"])
async def test_a_wrong_bit_fails_the_load_by_name_and_the_old_weights_stay(tmp_path, dtype, caplog):
    layout = Layout(manifest_of(parameters(0.0)), BUCKET_BYTES)
    settings = WeightSettings(
        address="tcp://127.0.0.1:0", bucket_bytes=BUCKET_BYTES, deadline_s=8, backend="gloo"
    )
    sender = WeightSender(settings, layout, torch.device("cpu"), tmp_path)
    engine = Engine(dtype)
    receiver = WeightReceiver(sender.address, "a", engine.load)
    sender.snapshot(parameters(1.5), 1)
    sender.publish()
    async with asyncio.timeout(120):
        tasks = [asyncio.create_task(run()) for run in (sender.run, receiver.run)]
        while not sender.gauges()["num_failed_loads"]:
            await asyncio.sleep(0.01)
        assert engine.has(0.0)
        assert "checksum of head from the sender is not the sender's" in caplog.text
        engine.flawed.is_flawed = False
        while not engine.has(1.5):
            await asyncio.sleep(0.01)
        while "load_s" not in sender.gauges():
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    sender.close()
    gauges = sender.gauges()
    assert [gauges[hop] for hop in ("receive_s", "load_s", "pause_s")] == [0.25, 0.125, 0.0625]
    assert all(gauges[hop] > 0 for hop in ("snapshot_s", "ready_wait_s", "transfer_s"))


class Pair:
    """A sender and a receiver without the protocol between them."""

    def __init__(self, timeout_s: float, **settings: object) -> None:
        config = WeightSettings.model_validate(
            {"bucket_bytes": BUCKET_BYTES, "deadline_s": 4 * timeout_s, **settings}
        )
        self.layout = Layout(manifest_of(parameters(0.0)), BUCKET_BYTES)
        self.data = torch.arange(self.layout.num_bytes, dtype=torch.int64).to(torch.uint8)
        self.sender = BroadcastSender(config, "127.0.0.1", torch.device("cpu"))
        self.receiver = TransferReceiver()

    def send(self) -> WeightUpdate:
        """Announces; `go` sends."""
        self.endpoint = self.sender.endpoints({"a": 1}, "gloo", verify=True)["a"]
        return WeightUpdate(
            policy_version=1,
            learner_id="h",
            manifest=self.layout.manifest,
            endpoint=self.endpoint,
            key=KEY,
        )

    def go(self) -> None:
        self.sender.send(self.endpoint, self.layout, self.data, KEY)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.mark.parametrize("verify", [False, True])
def test_what_is_received_in_place_is_not_copied(verify):
    pair = Pair(5, verify=verify)
    with ThreadPoolExecutor(1) as pool:
        landing = torch.zeros(pair.layout.num_bytes, dtype=torch.uint8)
        for _ in range(2):
            update = pair.send()
            sending = pool.submit(pair.go)
            received = dict(pair.receiver.tensors(update, landing))
            sending.result()
            own = landing.untyped_storage().data_ptr()
            assert {t.untyped_storage().data_ptr() for t in received.values()} == {own}
            assert torch.equal(landing, pair.data)
            landing.zero_()
    pair.close()


def test_a_receiver_that_gives_up_leaves_nobody_waiting_and_can_join_again():
    """The sender waits for the timeout at most, and no late byte lands in memory given up."""
    pair = Pair(3.0)
    landing = torch.zeros(pair.layout.num_bytes, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        update = pair.send()
        sending = pool.submit(pair.go)
        tensors = pair.receiver.tensors(update, landing)
        next(tensors)
        tensors.close()
        landing.zero_()
        start = time.monotonic()
        with pytest.raises(WeightTransferError):
            sending.result(timeout=120)
        assert time.monotonic() - start < 60
        assert not landing.any()
        update = pair.send()
        sending = pool.submit(pair.go)
        dict(pair.receiver.tensors(update, landing))
        sending.result()
        assert torch.equal(landing, pair.data)
    pair.close()


def test_a_sender_that_goes_silent_is_given_up_within_two_timeouts():
    pair = Pair(3.0)
    with ThreadPoolExecutor(1) as pool:
        update = pair.send()
        receiving = pool.submit(lambda: list(pair.receiver.tensors(update)))
        group = groups.join(replace(pair.endpoint, rank=0))
        group.start(pair.layout.buckets[0].of(pair.data)).wait()
        start = time.monotonic()
        with pytest.raises(WeightTransferError, match="broadcast failed"):
            receiving.result(timeout=120)
        assert time.monotonic() - start < 60
    group.close()
    pair.close()
