"""The HF engine's log-probabilities, for models that its slots decode and for those they do not."""

import asyncio
import logging
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.hf.batch import HfRequest, RunningBatch
from actors.engines.hf.cache import ModelCache
from actors.engines.hf.engine import HfEngine
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import Completion, SamplingParams
from tests.engines import update_to
from tests.model_families import VOCAB_SIZE, WINDOW, make_model, plain_logprobs
from tests.tiny_model import make_llama

SLOW = {
    "Gemma 2": "sliding windows, soft caps",
    "Gemma 3": "sliding windows",
    "Mistral with windows": "sliding windows",
    "gpt-oss": "attention sinks, sliding windows",
    "Falcon-H1": "layers with a state",
    "LFM2": "layers with a state",
    "Mamba 2": "layers with a state",
    "Qwen3-Next": "layers with a state",
    "Qwen3.5": "layers with a state",
}
FAST = ("Llama", "Qwen3", "DeepSeek-V3")


def make_batch(model: Any) -> RunningBatch:
    return RunningBatch(model, num_slots=8, max_model_len=64, eos_token_ids=frozenset(), seed=0)


def make_requests(shapes: list[tuple[int, int, float]], seed: int) -> list[HfRequest]:
    """Of (prompt length, completion length, temperature) each."""
    draw = np.random.default_rng(seed)
    return [
        HfRequest(
            tuple(draw.integers(2, VOCAB_SIZE, length).tolist()),
            SamplingParams(max_new_tokens=num_tokens, temperature=temperature),
        )
        for length, num_tokens, temperature in shapes
    ]


@torch.inference_mode()
def set_weights(model: Any, other: Any) -> None:
    model.load_state_dict(other.state_dict())


@torch.inference_mode()
def largest_gap(models: dict[int, Any], done: list[tuple[HfRequest, Completion]]) -> float:
    """Between the recorded log-probability of each token and that of its version's model."""
    gaps = []
    for request, completion in done:
        token_ids = torch.tensor([*request.prompt, *completion.token_ids.tolist()])
        for version, model in models.items():
            model.set_attn_implementation("eager")
            expected = plain_logprobs(model, token_ids)[len(request.prompt) - 1 :].numpy()
            of = completion.policy_versions == version
            gaps.extend(np.abs(expected - completion.logprobs)[of])
    assert len(gaps) == sum(len(completion.token_ids) for _, completion in done)
    return float(max(gaps))


@pytest.mark.parametrize("family", [*SLOW, *FAST])
def test_requests_join_and_leave_and_an_update_comes_between(family, caplog):
    model, models = make_model(family), {0: make_model(family), 1: make_model(family, seed=1)}
    with caplog.at_level(logging.WARNING):
        batch = make_batch(model)
    assert isinstance(batch._cache, ModelCache) == (family in SLOW)
    assert SLOW.get(family, "") in caplog.text
    assert WINDOW < 17
    batch.join(make_requests([(3, 16, 1.0), (11, 5, 1.0), (7, 9, 0.0), (7, 4, 1.0)], 0), 0)
    done, version = batch.leave(), 0
    for turn in range(19):
        if turn == 2:
            batch.join(make_requests([(1, 12, 1.0), (17, 6, 1.0), (2, 9, 0.0)], 1), version)
        elif turn == 6:
            set_weights(model, models[1])
            batch.recompute()
            version = 1
        elif len(batch):
            batch.step(version)
        done += batch.leave()
    assert (len(done), len(batch)) == (7, 0)
    assert {0, 1} <= {int(v) for _, completion in done for v in completion.policy_versions}
    assert largest_gap(models, done) < 1e-4


@pytest.mark.parametrize("family", ["Llama", "Gemma 2"])
def test_prompts_of_several_lengths_share_a_prefill(family, monkeypatch):
    model = make_model(family)
    batch, shapes = make_batch(model), []
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda **inputs: shapes.append(inputs["input_ids"].shape) or forward(**inputs),
    )
    batch.join(make_requests([(3, 4, 1.0), (11, 4, 1.0), (7, 4, 1.0)], 0), 0)
    assert shapes == [(3, 11)]


@pytest.mark.parametrize("family", ["RWKV", "RecurrentGemma", "Zamba 2", "GLM-5"])
def test_a_model_that_cannot_go_on_from_a_cache_is_refused(family):
    with pytest.raises(ConfigError, match=r"generator.engine: hf cannot decode \w+, .*: use vllm"):
        make_batch(make_model(family))


def test_a_position_embedding_that_depends_on_the_batch_is_refused_where_it_does():
    model = make_model("Phi-3 with LongRoPE")
    limit = model.config.original_max_position_embeddings
    assert limit < 64
    with pytest.raises(ConfigError, match=f"longrope .* up to {limit} tokens"):
        make_batch(model)


async def test_requests_of_one_turn_of_the_loop_share_a_prefill(monkeypatch):
    joined: list[int] = []
    join = RunningBatch.join

    def counting(batch: RunningBatch, requests: list[HfRequest], version: int) -> None:
        joined.append(len(requests))
        join(batch, requests, version)

    monkeypatch.setattr(RunningBatch, "join", counting)
    engine = HfEngine(make_llama(0), eos_token_ids=frozenset(), max_num_seqs=256, max_model_len=16)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        sampling = SamplingParams(max_new_tokens=1)
        await asyncio.gather(*(engine.generate([5, 6], sampling) for _ in range(200)))
    finally:
        sys.setswitchinterval(interval)
        await engine.close()
    assert joined == [200]


@pytest.mark.parametrize("recompute_kv", [True, False])
async def test_recompute_kv_makes_every_token_one_of_its_version(
    recompute_kv, monkeypatch, tmp_path
):
    model, reached, may_go_on = make_llama(0), threading.Event(), threading.Event()
    step = RunningBatch.step

    def waiting(batch: RunningBatch, version: int) -> None:
        if batch.num_tokens == 8:
            reached.set()
            may_go_on.wait(120)
        step(batch, version)

    monkeypatch.setattr(RunningBatch, "step", waiting)
    engine = HfEngine(
        model,
        eos_token_ids=frozenset(),
        max_num_seqs=2,
        max_model_len=32,
        recompute_kv=recompute_kv,
    )
    request = HfRequest((5, 6, 7, 8, 9), SamplingParams(max_new_tokens=20))
    answer = asyncio.create_task(engine.generate(request.prompt, request.sampling))
    await asyncio.to_thread(reached.wait, 120)
    update = update_to(make_llama(1), 1, tmp_path / "update.safetensors")
    loading = asyncio.create_task(engine.load_weights(update))
    async with asyncio.timeout(120):
        while not engine._commands:
            await asyncio.sleep(0.001)
    may_go_on.set()
    await loading
    completion = await answer
    await engine.close()
    assert set(completion.policy_versions.tolist()) == {0, 1}
    gap = largest_gap({0: make_llama(0), 1: make_llama(1)}, [(request, completion)])
    assert (gap < 1e-4) == recompute_kv


def test_recompute_kv_is_a_setting():
    settings = {"model": {"path": "x"}, "data": {"source": "addition"}}
    config = RunConfig.model_validate({**settings, "generator": {"hf": {"recompute_kv": True}}})
    assert config.generator.hf.recompute_kv
