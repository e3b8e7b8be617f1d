"""A broadcast of what changed gives the sender's bits, to those that have what it changes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from streamrl.config.weights import WeightSettings
from streamrl.errors import WeightTransferError
from streamrl.types import BroadcastEndpoint, WeightUpdate, replace
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.lora import LEFT, RIGHT
from streamrl.weights.transports.broadcast import BroadcastSender
from streamrl.weights.transports.differences import SentVersion
from streamrl.weights.transports.files import version_name
from streamrl.weights.transports.receive import TransferReceiver
from streamrl.weights.transports.shared_memory import SendBuffers
from tests.unit.weights.update_run import Generator, Run, run
from tests.waiting import until

KEY = bytes(range(40))
BY_DELTA = {"backend": "gloo", "delta": True}
MATRICES = {"embed": (500, 8), "layer.weight": (300, 200), "norm": (8,)}
FACTORS = {f"layer.weight{LEFT}": (300, 4), f"layer.weight{RIGHT}": (4, 200)}


class Pair:
    """A learner that steps and a receiver, with nothing but the broadcast between them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        settings = WeightSettings.model_validate(
            {**BY_DELTA, "deadline_s": 20, "bucket_bytes": 50_000}
        )
        self.master = {name: 0.05 * torch.randn(shape) for name, shape in shapes.items()}
        self.layout = Layout(manifest_of(self.master, dtype), settings.bucket_bytes)
        self._buffers = SendBuffers(self.layout, "cpu")
        self._sent = SentVersion(settings, self.layout, str, lambda _: KEY)
        self._sender = BroadcastSender(settings, "127.0.0.1", torch.device("cpu"))
        self.receiver = TransferReceiver()
        self.bits: dict[str, torch.Tensor] = {}

    def send(self, version: int, landing: torch.Tensor | None, damage: bool = False) -> bool:
        """Whether it went as a difference; the tensors that arrive are compared."""
        for parameter in self.master.values():
            parameter += 1e-5 * torch.randn_like(parameter).sign()
        self._buffers.write(self.master, version)
        with ThreadPoolExecutor(1) as pool, self._buffers.reading() as held:
            assert held is not None
            difference, takers = self._sent.difference_to(version, held.data, {"a": version - 1})
            endpoint = self._sender.endpoints(
                {"a": 1}, "gloo", verify=False, difference=difference
            )["a"]
            if damage:
                wrong = replace(endpoint.difference, checksums=bytes(8 * len(self.layout.buckets)))
                endpoint = replace(endpoint, difference=wrong)
            update = WeightUpdate(
                policy_version=version,
                learner_id="h",
                manifest=self.layout.manifest,
                endpoint=endpoint,
                key=KEY,
            )
            sending = pool.submit(
                self._sender.send, endpoint, self.layout, held.data, KEY, difference
            )
            received = {n: t.clone() for n, t in self.receiver.tensors(update, landing)}
            sending.result()
            sent = dict(self.layout.views(held.data))
            assert received.keys() == sent.keys()
            assert all(torch.equal(received[name], sent[name]) for name in sent)
        assert (difference is not None) == bool(takers)
        return difference is not None

    def close(self) -> None:
        self._sender.close()
        self.receiver.close()


@pytest.fixture
def pair(request):
    made = Pair(*request.param)
    # Names of versions are those that the receiver makes of learner and number.
    made._sent._name = lambda version: version_name("h", version)
    yield made
    made.close()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "pair",
    [
        (MATRICES, torch.bfloat16),
        (MATRICES, torch.float8_e4m3fn),
        (MATRICES, torch.float32),
        (FACTORS, torch.bfloat16),
    ],
    ids=["bfloat16", "float8", "float32", "factors of LoRA"],
    indirect=True,
)
def test_differences_give_exactly_the_senders_bits(pair, in_place):
    landings = [torch.zeros(pair.layout.num_bytes, dtype=torch.uint8) for _ in range(2)]
    kinds = [pair.send(v, landings[v % 2] if in_place else None) for v in range(1, 5)]
    assert kinds == [False, True, True, True]


@pytest.mark.parametrize("pair", [(MATRICES, torch.bfloat16)], indirect=True)
def test_a_result_that_is_not_the_senders_is_refused(pair):
    pair.send(1, None)
    with pytest.raises(WeightTransferError, match="does not give the sender's bytes: bucket 0"):
        pair.send(2, None, damage=True)
    with pytest.raises(WeightTransferError, match=r"changes h-00000002, but here is nothing"):
        pair.send(3, None)


def kinds(generator: Generator) -> list[bool]:
    """Of each update that was loaded, whether it was a difference."""
    endpoints = [update.endpoint for update in generator.updates]
    assert all(isinstance(endpoint, BroadcastEndpoint) for endpoint in endpoints)
    return [endpoint.difference is not None for endpoint in endpoints]


async def publish(started: Run, versions: range, *generators: Generator) -> None:
    for version in versions:
        started.publish(version, float(version))
        await until(lambda v=version: all(g.policy_version == v for g in generators))
        assert all(g.has(float(version)) for g in generators)


async def test_who_has_the_version_before_gets_the_difference_and_others_the_whole(tmp_path):
    async with run(tmp_path, **BY_DELTA, catch_up="broadcast") as started:
        first, _ = started.join("first")
        await publish(started, range(1, 4), first)
        late, _ = started.join("late")
        await until(lambda: late.policy_version == 3)
        await publish(started, range(4, 6), first, late)
        assert kinds(first) == [False, True, True, True, True]
        assert kinds(late) == [False, True, True]
        assert 0 < started.sender.gauges()["difference_bytes"] < 4 * (400 + 400 + 8)


async def test_a_file_that_a_late_receiver_read_is_what_the_next_difference_changes(tmp_path):
    async with run(tmp_path, **BY_DELTA) as started:
        first, _ = started.join("first")
        await publish(started, range(1, 3), first)
        late, _ = started.join("late")
        await until(lambda: late.policy_version == 2)
        late.updates.clear()
        await publish(started, range(3, 5), first, late)
        assert kinds(late) == [True, True]


async def test_a_whole_version_comes_after_full_every_differences(tmp_path):
    async with run(tmp_path, **BY_DELTA, full_every=2) as started:
        generator, _ = started.join("a")
        await publish(started, range(1, 8), generator)
        assert kinds(generator) == [False, True, True, False, True, True, False]


async def test_a_receiver_that_has_lost_what_it_had_gets_the_whole_and_the_others_do_not(tmp_path):
    async with run(tmp_path, **BY_DELTA) as started:
        sound, _ = started.join("sound")
        forgetful, _ = started.join("forgetful")
        await until(lambda: started.sender.gauges()["num_receivers"] == 2)
        await publish(started, range(1, 3), sound, forgetful)
        forgetful._transfer._kept = None
        await publish(started, range(3, 6), sound, forgetful)
        assert kinds(sound) == [False, True, True, True, True]
        assert kinds(forgetful) == [False, True, False, True, True]
        assert started.sender.gauges()["num_failed_loads"] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "store", "store": "file:///x"}, "a store has differences in any case"),
        ({"backend": "nccl"}, r"weights\.backend was nccl, which is faster without"),
        ({"backend": "shared"}, r"weights\.backend was shared, which is faster without"),
    ],
)
def test_differences_are_refused_where_they_cannot_be_sent(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightSettings.model_validate({"delta": True, **settings})
