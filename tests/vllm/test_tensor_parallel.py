"""An engine of two vLLM workers: each holds a shard, and is a rank of its own in a broadcast."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from streamrl.config.weights import WeightSettings
from streamrl.interfaces import Engine
from streamrl.types import BroadcastEndpoint, LoadReport, SamplingParams, WeightUpdate
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.receiver import WeightReceiver
from streamrl.weights.sender import WeightSender
from tests.engines import make_model, open_engine
from tests.vllm.test_pause_modes import PROMPTS, logprob_errors

pytestmark = pytest.mark.asyncio(loop_scope="session")
NUM_WORKERS = 2
# So small that a version comes in several buckets.
BUCKET_BYTES = 4096


@pytest_asyncio.fixture(loop_scope="session")
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    make_model().save_pretrained(tmp_path / "model")
    settings = {"tensor_parallel_size": NUM_WORKERS, "recompute_kv": True}
    engine = open_engine(tmp_path / "model", "vllm", max_model_len=4000, vllm=settings)
    yield engine
    await engine.close()


async def test_two_workers_sample_as_one_and_take_a_broadcast_in_mid_generation(engine, tmp_path):
    model = make_model()
    for prompt in PROMPTS:
        greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
        completion = await engine.generate(prompt, greedy)
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert completion.token_ids.tolist() == expected[0, len(prompt) :].tolist()

    long = SamplingParams(max_new_tokens=3000, ignore_eos=True)
    running = [asyncio.create_task(engine.generate(prompt, long)) for prompt in PROMPTS]
    async with asyncio.timeout(120):
        while engine.gauges()["num_active"] < len(PROMPTS):
            await asyncio.sleep(0.001)
    update = await broadcast(dict(make_model(seed=1).named_parameters()), engine, tmp_path)
    assert isinstance(update.endpoint, BroadcastEndpoint)
    assert update.endpoint.world_size == 1 + NUM_WORKERS
    for prompt, completion in zip(PROMPTS, await asyncio.gather(*running), strict=True):
        old = completion.policy_versions == 0
        assert 0 < old.sum() < long.max_new_tokens
        assert logprob_errors(0, prompt, completion)[old].max() < 1e-4
        assert logprob_errors(1, prompt, completion)[~old].max() < 1e-4


async def broadcast(
    parameters: dict[str, torch.Tensor], engine: Engine, folder: Path
) -> WeightUpdate:
    """Publishes the parameters as version 1, as a learner does; returns the update that was loaded.

    Waits until it has, 30 s at most.
    """
    loaded = asyncio.get_running_loop().create_future()

    async def load(update: WeightUpdate) -> LoadReport:
        report = await engine.load_weights(update)
        loaded.set_result(update)
        return report

    settings = WeightSettings(
        address="tcp://127.0.0.1:0", bucket_bytes=BUCKET_BYTES, catch_up="broadcast", verify=True
    )
    layout = Layout(manifest_of(parameters), BUCKET_BYTES)
    sender = WeightSender(settings, layout, torch.device("cpu"), folder)
    receiver = WeightReceiver(sender.address, "engine", load, num_ranks=NUM_WORKERS)
    ends = [asyncio.create_task(end.run()) for end in (sender, receiver)]
    sender.snapshot(parameters, 1)
    sender.publish()
    try:
        async with asyncio.timeout(120):
            return await loaded
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        sender.close()
