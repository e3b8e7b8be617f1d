"""What becomes of requests in flight: how often they are heard of, and at an update, by
`generator.vllm.pause_mode`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from actors.engines import make_engine
from actors.engines.served.engine import ServedEngine
from streamrl.config import RunConfig
from streamrl.config.generator import VllmSettings
from streamrl.errors import ConfigError
from streamrl.interfaces import CompletionHandle, Engine
from streamrl.types import Completion, FinishReason, SamplingParams
from tests.engines import VllmEngines, logprob_errors, make_model, update_to

pytestmark = pytest.mark.asyncio(loop_scope="session")
LONG = SamplingParams(max_new_tokens=VllmEngines.num_long, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9], [20, 21]]


@pytest_asyncio.fixture(loop_scope="session")
async def engine(engines: VllmEngines) -> AsyncIterator[Engine]:
    await engines.renew()
    engine = await engines.make()
    yield engine
    configure(engine, VllmSettings())


def configure(engine: Engine, settings: VllmSettings) -> None:
    """From the next update on, pause as these settings say."""
    loader = engine._server.updates if isinstance(engine, ServedEngine) else engine._loader
    loader.settings = settings


async def num_tokens(engine: Engine) -> float:
    """Sampled so far; a server is asked, since the engine's own reading of it may be old."""
    read = await engine._server.readings() if isinstance(engine, ServedEngine) else engine.gauges()
    return read["num_tokens"]


async def until_sampled(engine: Engine, total: float) -> None:
    async with asyncio.timeout(120):
        while await num_tokens(engine) < total:
            await asyncio.sleep(0.001)


class CountedHandle(CompletionHandle):
    """Counts what it is told of `num_tokens`."""

    num_told = 0

    def __setattr__(self, name: str, value: object) -> None:
        self.__dict__["num_told"] = self.num_told + (name == "num_tokens")
        super().__setattr__(name, value)


async def test_tokens_are_reported_now_and_then(engine):
    handle = CountedHandle()
    params = SamplingParams(max_new_tokens=320, ignore_eos=True)
    completion = await engine.generate([9], params, handle)
    assert len(completion.token_ids) == 320
    assert handle.num_tokens in (320, -1)
    assert handle.num_told < 20


async def update_in_mid_generation(
    engine: Engine, path: Path, settings: VllmSettings
) -> list[Completion]:
    """Completions of PROMPTS that were running when seed 1 replaced seed 0 as version 1."""
    configure(engine, settings)
    update = update_to(make_model(seed=1), 1, path / "one.safetensors")
    before = await num_tokens(engine)
    running = [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
    await until_sampled(engine, before + 60)
    await engine.load_weights(update)
    return await asyncio.gather(*running)


async def test_keep_goes_on_with_the_new_weights_and_the_old_cache(engine, tmp_path):
    settings = VllmSettings(pause_mode="keep")
    for prompt, completion in zip(
        PROMPTS, await update_in_mid_generation(engine, tmp_path, settings), strict=True
    ):
        assert len(completion.token_ids) == LONG.max_new_tokens
        old = completion.policy_versions == 0
        assert 0 < old.sum() < LONG.max_new_tokens
        assert logprob_errors(0, prompt, completion)[old].max() < 1e-4
        assert logprob_errors(1, prompt, completion)[~old].max() > 1e-2


async def test_keep_with_recompute_kv_is_as_if_the_new_weights_had_read_it_all(engine, tmp_path):
    settings = VllmSettings(pause_mode="keep", recompute_kv=True)
    for prompt, completion in zip(
        PROMPTS, await update_in_mid_generation(engine, tmp_path, settings), strict=True
    ):
        assert len(completion.token_ids) == LONG.max_new_tokens
        old = completion.policy_versions == 0
        assert 0 < old.sum() < LONG.max_new_tokens
        assert logprob_errors(0, prompt, completion)[old].max() < 1e-4
        assert logprob_errors(1, prompt, completion)[~old].max() < 1e-4


@pytest.mark.parametrize(("mode", "version"), [("wait", 0), ("abort", 1)])
async def test_wait_ends_and_abort_begins_anew(engine, tmp_path, mode, version):
    settings = VllmSettings(pause_mode=mode)
    for prompt, completion in zip(
        PROMPTS, await update_in_mid_generation(engine, tmp_path, settings), strict=True
    ):
        assert len(completion.token_ids) == LONG.max_new_tokens
        assert set(completion.policy_versions.tolist()) == {version}
        assert logprob_errors(version, prompt, completion).max() < 1e-4


async def test_a_request_that_a_paused_vllm_does_not_take_is_sent_again(engine, monkeypatch):
    if isinstance(engine, ServedEngine):
        pytest.skip("any server's 503 is asked again")
    generate, refused = engine._llm.generate, Exception("paused")
    refused.status_code = 503

    async def once(*arguments: object) -> AsyncIterator[object]:
        monkeypatch.undo()
        raise refused
        yield

    monkeypatch.setattr(engine._llm, "generate", once)
    completion = await engine.generate([5], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(completion.token_ids) == 4
    assert engine._llm.generate == generate


async def test_a_completion_stopped_after_an_update_has_the_versions_of_its_tokens(
    engine, tmp_path
):
    handle, prompt = CompletionHandle(), PROMPTS[0]
    first = await num_tokens(engine)
    running = asyncio.create_task(engine.generate(prompt, LONG, handle))
    await until_sampled(engine, first + 60)
    await engine.load_weights(update_to(make_model(seed=1), 1, tmp_path / "one.safetensors"))
    await until_sampled(engine, await num_tokens(engine) + 60)
    handle.stop.set()
    completion = await running
    assert completion.finish_reason is FinishReason.DEADLINE
    assert 60 < len(completion.token_ids) < LONG.max_new_tokens
    old = completion.policy_versions == 0
    assert set(completion.policy_versions.tolist()) == {0, 1}
    assert logprob_errors(0, prompt, completion)[old].max() < 1e-4


async def test_prefixes_are_not_shared_across_versions(engine, tmp_path):
    # Longer than two blocks of the KV cache, so there is a prefix to share.
    prompt = ([5, 6, 7, 8, 9] * 60)[:290]
    one = SamplingParams(max_new_tokens=8, ignore_eos=True)
    for version in (0, 1, 2):
        model = make_model(seed=version)
        await engine.load_weights(update_to(model, version, tmp_path / "w.safetensors"))
        for _ in range(2):
            completion = await engine.generate(prompt, one)
            assert logprob_errors(version, prompt, completion).max() < 1e-4


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"engine_kwargs": {"no_such_argument": 1}}, "no_such_argument"),
        (
            {"vllm": {"max_num_batched_tokens": 2, "enable_chunked_prefill": False}},
            "vLLM refuses its arguments",
        ),
    ],
)
async def test_arguments_vllm_does_not_take_are_a_configuration_error(tmp_path, generator, message):
    make_model().save_pretrained(tmp_path)
    config = {
        "model": {"path": str(tmp_path)},
        "data": {"source": "copy", "max_prompt_length": 8},
        "generator": {"engine": "vllm", "max_new_tokens": 8, **generator},
    }
    with pytest.raises(ConfigError, match=message):
        make_engine(RunConfig.model_validate(config), seed=0)
