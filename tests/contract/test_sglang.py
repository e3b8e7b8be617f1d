"""What SGLang's client promises beyond any engine's, on the server that stands in for SGLang."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from actors.engines import make_engine
from actors.engines.served.process import ServerProcess
from streamrl.errors import ConfigError, RolloutError, TransportError, WeightTransferError
from streamrl.interfaces import Engine
from streamrl.types import Completion, SamplingParams
from tests.engines import ENVIRONMENT, make_model, run_config, update_to
from tests.ports import free_port

GREEDY = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=600, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9], [20, 21]]


@dataclass
class StandIn:
    url: str
    model: Path
    process: ServerProcess

    def open(self, **sglang: object) -> Engine:
        config = run_config(
            self.model,
            engine="sglang",
            max_num_seqs=4,
            max_model_len=1000,
            sglang={"url": self.url, "retry_timeout_s": 1.0, "start_timeout_s": 60.0, **sglang},
        )
        return make_engine(config, seed=0)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder, port = tmp_path_factory.mktemp("sglang"), free_port()
    make_model().save_pretrained(folder)
    words = [sys.executable, "-m", "tests.standins.sglang_server", "--model-path", str(folder)]
    words += ["--port", str(port), "--enable-metrics", "--skip-tokenizer-init"]
    process = ServerProcess(words, folder / "log", ENVIRONMENT)
    yield StandIn(f"http://127.0.0.1:{port}", folder, process)
    process.close()


@pytest_asyncio.fixture
async def engine(stand_in: StandIn) -> AsyncIterator[Engine]:
    opened = stand_in.open()
    yield opened
    await opened.close()


@torch.no_grad()
def logprob_errors(seed: int, prompt: list[int], completion: Completion) -> np.ndarray:
    """How far what was recorded is from a forward pass of the seed's model, per token [N]."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logits = make_model(seed=seed)(ids).logits[0, len(prompt) - 1 : -1].float()
    index = torch.from_numpy(completion.token_ids).long()[:, None]
    expected = torch.log_softmax(logits, dim=-1).gather(-1, index)[:, 0].numpy()
    return np.abs(expected - completion.logprobs)


async def update_in_mid_generation(engine: Engine, path: Path) -> list[Completion]:
    """Completions of PROMPTS that were running when seed 1 replaced seed 0 as version 1."""
    update = update_to(make_model(seed=1), 1, path / "one.safetensors")
    running = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
    async with asyncio.timeout(20):
        while engine.gauges()["num_active"] < 3:
            await asyncio.sleep(0.001)
    await engine.load_weights(update)
    return await asyncio.gather(*running)


async def test_recompute_kv_is_as_if_the_new_weights_had_read_it_all(stand_in, tmp_path):
    engine = stand_in.open(recompute_kv=True)
    completions = await update_in_mid_generation(engine, tmp_path)
    await engine.close()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.token_ids) == 600
        old = completion.policy_versions == 0
        assert 0 < old.sum() < 600
        assert logprob_errors(0, prompt, completion)[old].max() < 1e-4
        assert logprob_errors(1, prompt, completion)[~old].max() < 1e-4


async def test_abort_begins_anew(stand_in, tmp_path):
    engine = stand_in.open(pause_mode="abort")
    completions = await update_in_mid_generation(engine, tmp_path)
    await engine.close()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.token_ids) == 600
        assert set(completion.policy_versions.tolist()) == {1}
        assert logprob_errors(1, prompt, completion).max() < 1e-4


async def test_a_new_engine_has_the_first_weights_whatever_another_one_left(stand_in, tmp_path):
    engine = stand_in.open()
    first = await engine.generate([9], GREEDY)
    await engine.load_weights(update_to(make_model(seed=1), 1, tmp_path / "one.safetensors"))
    updated = await engine.generate([9], GREEDY)
    assert updated.token_ids.tolist() != first.token_ids.tolist()
    # As a generator leaves it that dies inside an update.
    await engine._server._http.send("/pause_generation", {"mode": "in_place"})
    await engine._server._http.send("/begin_weight_update", {})
    await engine.close()
    engine = stand_in.open()
    again = await engine.generate([9], GREEDY)
    assert engine.policy_version == 0
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert set(again.policy_versions.tolist()) == {0}
    await engine.close()


async def test_a_second_generator_on_the_server_ends_the_first(stand_in, engine):
    await engine.generate([9], GREEDY)
    second = stand_in.open()
    with pytest.raises(TransportError, match="which this generator did not give it"):
        await engine.generate([9], GREEDY)
    with pytest.raises(TransportError, match="which this generator did not give it"):
        await engine.generate([9], GREEDY)
    await second.generate([9], GREEDY)
    await second.close()


async def test_what_the_server_refuses_fails_alone(engine):
    good = asyncio.create_task(engine.generate([5], LONG))
    with pytest.raises(RolloutError, match="enable_deterministic_inference"):
        await engine.generate([5], SamplingParams(max_new_tokens=2, seed=3))
    engine._max_model_len = 5000
    with pytest.raises(RolloutError, match="exceeds the model's maximum context length"):
        await engine.generate([5], SamplingParams(max_new_tokens=4500))
    assert len((await good).token_ids) == 600


async def test_an_update_without_a_group_changes_nothing(stand_in, engine, tmp_path, monkeypatch):
    before = await engine.generate([9], GREEDY)
    relay = engine._server._relay
    monkeypatch.setattr(relay._store, "port", free_port())
    monkeypatch.setattr(relay, "_timeout_s", 0.5)
    update = update_to(make_model(seed=1), 1, tmp_path / "one.safetensors")
    with pytest.raises(WeightTransferError, match=r"reach_host"):
        await engine.load_weights(update)
    after = await engine.generate([9], GREEDY)
    assert (engine.policy_version, set(after.policy_versions.tolist())) == (0, {0})
    assert before.token_ids.tolist() == after.token_ids.tolist()


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"sglang": {"tp_size": 2}}, r"sglang\.tp_size: was 2, but .* started with 1"),
        ({"max_model_len": 9000}, r"takes 4000 tokens .*max_model_len is 9000"),
        ({"min_new_tokens": 1}, "min_new_tokens: was 1, for which SGLang needs a tokenizer"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(stand_in, generator, message):
    sglang = {"url": stand_in.url, **generator.pop("sglang", {})}
    config = run_config(stand_in.model, engine="sglang", sglang=sglang, **generator)
    with pytest.raises(ConfigError, match=message):
        make_engine(config, seed=0)


async def test_the_servers_end_is_the_engines(stand_in, engine):
    """The last one: the server does not come back."""
    running = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
    await asyncio.sleep(0)
    await asyncio.to_thread(stand_in.process.close)
    async with asyncio.timeout(20):
        for task in running:
            with pytest.raises(TransportError, match="the inference server is gone"):
                await task
        with pytest.raises(TransportError, match="the inference server is gone"):
            await engine.generate([9], GREEDY)
