"""SGLang's client when its server refuses, does not fit or ends; a stand-in serves it."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from msgspec import structs

from actors.engines import make_engine
from actors.engines.served.process import ServerProcess
from actors.engines.served.server import ServedRequest
from actors.engines.sglang.messages import GenerateMetaInfo, SglangFinishReason
from actors.engines.sglang.server import sets_of
from streamrl.errors import ConfigError, RolloutError, TransportError, WeightTransferError
from streamrl.interfaces import Engine
from streamrl.types import SamplingParams
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


async def test_the_mask_is_what_the_log_probabilities_are_over(engine):
    cut = SamplingParams(
        max_new_tokens=9, temperature=0.7, top_k=4, ignore_eos=True, keep_sampling_mask=True
    )
    plain = SamplingParams(max_new_tokens=9, ignore_eos=True, num_top_logprobs=3)
    masked, top = await asyncio.gather(engine.generate([5], cut), engine.generate([5], plain))
    assert masked.sampling_mask.counts.tolist() == [4] * 9
    ids = torch.tensor([[5, *masked.token_ids.tolist()]])
    for i, row in enumerate(make_model()(ids).logits[0, :-1].detach() / 0.7):
        kept = torch.from_numpy(masked.sampling_mask.part(slice(i, i + 1)).token_ids).long()
        logprob = row[masked.token_ids[i]] - row[kept].logsumexp(0)
        assert abs(float(logprob) - masked.logprobs[i]) < 1e-4
    ids = torch.tensor([[5, *top.token_ids.tolist()]])
    likeliest = make_model()(ids).logits[0, :-1].log_softmax(-1).topk(3)
    assert (top.top_logprobs.token_ids == likeliest.indices.flatten().numpy()).all()


def test_the_likeliest_of_a_truncated_distribution_are_those_of_its_mask():
    """SGLang's are of the whole one: what is left of them gets as much more as the token itself."""
    meta = GenerateMetaInfo(
        finish_reason=SglangFinishReason("length"),
        output_token_logprobs=[(-1.5, 7, None)],
        output_token_sampling_logprobs=[-1.0],
        output_token_sampling_mask=[[7, 8]],
        output_top_logprobs=[[(-0.5, 9, None), (-1.0, 8, None), (-1.5, 7, None)]],
    )
    sampling = SamplingParams(
        max_new_tokens=1, top_k=2, keep_sampling_mask=True, num_top_logprobs=3
    )
    request = ServedRequest(
        id="a",
        prompt_token_ids=[1],
        sampling=sampling,
        stops=frozenset(),
        cache_salt="",
    )
    mask, top = sets_of(meta, request, 1)
    assert mask.token_ids.tolist() == [7, 8]
    assert (top.token_ids.tolist(), top.logprobs.tolist()) == ([8, 7], [-0.5, -1.0])
    with pytest.raises(RolloutError, match="no sampling mask for 1 of its tokens"):
        sets_of(structs.replace(meta, output_token_sampling_mask=None), request, 1)


async def test_an_update_without_a_group_changes_nothing(stand_in, engine, tmp_path, monkeypatch):
    before = await engine.generate([9], GREEDY)
    relay = engine._server.updates
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
        ({"sglang": {"recompute_kv": False}}, "started with --disable-overlap-schedule"),
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
    async with asyncio.timeout(120):
        for task in running:
            with pytest.raises(TransportError, match="the inference server is gone"):
                await task
        with pytest.raises(TransportError, match="the inference server is gone"):
            await engine.generate([9], GREEDY)
