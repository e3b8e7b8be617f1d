"""What every engine promises, held against a plain forward pass of the same weights.

Runs on the engines this environment has: a vLLM in this process and one by URL where vLLM is
installed, an SGLang by URL where SGLang is, else HF.
"""

import asyncio
from functools import partial

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import LlamaForCausalLM

from streamrl.errors import RolloutError, WeightTransferError
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, FinishReason, SamplingParams
from tests.engines import (
    HfEngines,
    MakeEngine,
    SharingLearner,
    VllmEngines,
    make_model,
    update_to,
)
from tests.tiny_model import EOS, VOCAB_SIZE
from tests.waiting import until as waiting_until

pytestmark = pytest.mark.asyncio(loop_scope="session")
until = partial(waiting_until, every_s=0.001)
PROMPTS = [[5, 6, 7], [9], [3, 3, 3, 3, 3, 3, 3], [20, 21], [5, 6, 7]]
FREE = {"ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="session")
async def make_engine(engines: HfEngines | VllmEngines) -> MakeEngine:
    await engines.renew()
    return engines.make


@torch.no_grad()
def logprobs_of(
    model: LlamaForCausalLM, prompt: list[int], completion: Completion, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities [N, V] of the model at each token of the completion."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, dim=-1)


def chosen(logprobs: torch.Tensor, completion: Completion) -> np.ndarray:
    index = torch.from_numpy(completion.token_ids).long()[:, None]
    return logprobs.gather(-1, index)[:, 0].numpy()


async def test_greedy_equals_transformers_greedy(make_engine):
    model = make_model()
    engine = await make_engine(make_model())
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
    completions = await asyncio.gather(*(engine.generate(p, sampling) for p in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        reference = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert completion.token_ids.tolist() == reference[0, len(prompt) :].tolist()
        assert (
            np.abs(
                chosen(logprobs_of(model, prompt, completion), completion) - completion.logprobs
            ).max()
            < 1e-4
        )


@pytest.mark.parametrize("top_p", [1.0, 0.9])
async def test_the_sampling_mask_is_what_was_left_to_sample_from(make_engine, top_p):
    """Over it, a plain forward pass has the engine's log-probabilities; without it, others."""
    model = make_model()
    engine = await make_engine(make_model())
    sampling = SamplingParams(
        max_new_tokens=12, temperature=0.7, top_k=5, top_p=top_p, keep_sampling_mask=True, **FREE
    )
    completions = await asyncio.gather(*(engine.generate(p, sampling) for p in PROMPTS))
    sizes = set()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        plain, mask = logprobs_of(model, prompt, completion, 0.7), completion.sampling_mask
        for i, row in enumerate(plain):
            kept = torch.from_numpy(mask.part(slice(i, i + 1)).token_ids).long()
            token, behavior = int(completion.token_ids[i]), float(completion.logprobs[i])
            assert abs(float(row[token] - row[kept].logsumexp(0)) - behavior) < 1e-4
            assert float(row[token]) < behavior - 1e-3
            assert 1 <= len(kept) <= 5
            sizes |= {len(kept)}
        assert completion.top_logprobs is None
    assert (sizes == {5}) == (top_p == 1)


async def test_top_logprobs_are_those_of_the_likeliest_tokens(make_engine):
    model = make_model()
    engine = await make_engine(make_model())
    sampling = SamplingParams(max_new_tokens=12, temperature=0.7, num_top_logprobs=4, **FREE)
    completions = await asyncio.gather(*(engine.generate(p, sampling) for p in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        likeliest = logprobs_of(model, prompt, completion, 0.7).topk(4)
        top = completion.top_logprobs
        assert top.counts.tolist() == [4] * len(completion.token_ids)
        assert (top.token_ids == likeliest.indices.flatten().numpy()).all()
        assert np.abs(top.logprobs - likeliest.values.flatten().numpy()).max() < 1e-4
        assert completion.sampling_mask is None


# The logits are as large as 10, where neighboring bfloat16 numbers are 0.06 apart.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_logprobs_equal_a_forward_pass(make_engine, engines, dtype, tolerance, temperature):
    if dtype == torch.bfloat16 and not engines.has_bfloat16:
        pytest.skip("has no server of this precision")
    engine = await make_engine(make_model().to(dtype))
    sampling = SamplingParams(max_new_tokens=30, temperature=temperature, **FREE)
    completions = await asyncio.gather(*(engine.generate(p, sampling) for p in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = chosen(
            logprobs_of(make_model().to(dtype), prompt, completion, temperature), completion
        )
        error = np.abs(expected - completion.logprobs)
        assert error.max() < tolerance
        assert error.mean() < tolerance / 5


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.7}])
async def test_logprobs_are_of_the_truncated_distribution(make_engine, engines, truncation):
    engine = await make_engine()
    sampling = SamplingParams(max_new_tokens=40, **truncation, **FREE)
    completion = await engine.generate([5, 6], sampling)
    whole = logprobs_of(make_model(), [5, 6], completion)
    for row, token, logprob in zip(whole, completion.token_ids, completion.logprobs, strict=True):
        full = np.array(sorted(row.exp().tolist(), reverse=True))
        kept = full[: truncation.get("top_k", VOCAB_SIZE)]
        before = np.concatenate([[0.0], np.cumsum(kept)[:-1]])
        whole_mass = 1.0 if engines.truncates_jointly else kept.sum()
        full = kept[before / whole_mass < truncation.get("top_p", 1.0) + 1e-9]
        assert row[token].exp() >= full[-1] * (1 - 1e-5), "a token outside the kept ones"
        assert logprob == pytest.approx(row[token].item() - np.log(full.sum()), abs=1e-4)


async def test_tokens_follow_the_distribution(make_engine):
    engine = await make_engine()
    sampling = SamplingParams(max_new_tokens=1, **FREE)
    drawn = await asyncio.gather(*(engine.generate([5, 6], sampling) for _ in range(2000)))
    counts = np.bincount([int(c.token_ids[0]) for c in drawn], minlength=VOCAB_SIZE)
    expected = logprobs_of(make_model(), [5, 6], drawn[0])[0].exp().numpy() * len(drawn)
    seen = expected > 5
    chi_squared = ((counts - expected) ** 2 / expected)[seen].sum()
    assert chi_squared < seen.sum() + 6 * np.sqrt(2 * seen.sum())


async def test_a_seed_gives_the_same_completion_whoever_else_is_running(make_engine, engines):
    engine = await make_engine()
    if not engines.has_seeds:
        with pytest.raises(RolloutError, match="enable_deterministic_inference"):
            await engine.generate([5], SamplingParams(max_new_tokens=2, seed=3))
        return
    seeded = SamplingParams(max_new_tokens=20, seed=3, **FREE)
    alone = await engine.generate(PROMPTS[0], seeded)
    other = SamplingParams(max_new_tokens=25, **FREE)
    crowd = [engine.generate(p, other) for p in PROMPTS]
    among_others = (await asyncio.gather(*crowd, engine.generate(PROMPTS[0], seeded)))[-1]
    assert alone.token_ids.tolist() == among_others.token_ids.tolist()
    different = await engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=20, seed=4, **FREE))
    assert alone.token_ids.tolist() != different.token_ids.tolist()


async def test_completions_end_at_stop_tokens_at_eos_or_at_their_length(make_engine):
    engine = await make_engine()
    free = await engine.generate([5], SamplingParams(max_new_tokens=30, temperature=0.0, **FREE))
    assert (len(free.token_ids), free.finish_reason) == (30, FinishReason.LENGTH)
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    stopped = await engine.generate(
        [5], SamplingParams(max_new_tokens=30, temperature=0.0, stop_token_ids=(stop,), **FREE)
    )
    assert stopped.finish_reason == FinishReason.STOP
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[: first + 1]
    ends = await asyncio.gather(
        *(engine.generate([5], SamplingParams(max_new_tokens=60)) for _ in range(40))
    )
    by_eos = [c for c in ends if c.finish_reason == FinishReason.STOP]
    assert by_eos
    assert all(c.token_ids[-1] == EOS and EOS not in c.token_ids[:-1] for c in by_eos)


async def test_no_stop_token_before_the_minimum(make_engine):
    engine = await make_engine()
    sampling = SamplingParams(
        max_new_tokens=40, min_new_tokens=10, stop_token_ids=tuple(range(2, 20))
    )
    ends = await asyncio.gather(*(engine.generate([5], sampling) for _ in range(20)))
    assert min(len(c.token_ids) for c in ends) == 11


async def test_the_longest_length_cuts_a_completion(make_engine):
    engine = await make_engine(max_model_len=4000)
    completion = await engine.generate([5] * 3994, SamplingParams(max_new_tokens=50, **FREE))
    assert (len(completion.token_ids), completion.finish_reason) == (6, FinishReason.LENGTH)


async def test_a_prompt_without_room_fails_alone(make_engine):
    engine = await make_engine(max_model_len=4000)
    good = asyncio.create_task(engine.generate([5], SamplingParams(max_new_tokens=8, **FREE)))
    for prompt in ([5] * 4000, []):
        with pytest.raises(RolloutError, match=r"generator\.max_model_len is 4000"):
            await engine.generate(prompt, SamplingParams(max_new_tokens=1))
    assert len((await good).token_ids) == 8


async def test_short_requests_do_not_wait_for_long_ones(make_engine):
    engine = await make_engine(max_model_len=4000)
    handle, endless = CompletionHandle(), SamplingParams(max_new_tokens=3900, **FREE)
    long = asyncio.create_task(engine.generate([5], endless, handle))
    await until(lambda: engine.gauges()["num_active"] == 1)
    two = SamplingParams(max_new_tokens=2, **FREE)
    short = await asyncio.gather(*(engine.generate([5], two) for _ in range(20)))
    assert [len(completion.token_ids) for completion in short] == [2] * 20
    assert not long.done()
    handle.stop.set()
    await long


async def test_canceled_requests_give_their_slots_back(make_engine):
    engine = await make_engine(max_model_len=4000)
    sampling = SamplingParams(max_new_tokens=3000, **FREE)
    long = [asyncio.create_task(engine.generate([5], sampling)) for _ in range(4)]
    await until(lambda: engine.gauges()["num_active"] == 4)
    for task in long:
        task.cancel()
    async with asyncio.timeout(120):
        await engine.generate([6], SamplingParams(max_new_tokens=2, **FREE))
    await until(lambda: engine.gauges()["num_active"] == 0)


async def test_a_stopped_completion_has_what_was_sampled_and_the_others_go_on(make_engine, engines):
    engine = await make_engine(max_model_len=4000)
    first = engine.gauges()["num_tokens"]
    handle = CompletionHandle()
    endless = SamplingParams(max_new_tokens=3900, **FREE)
    stopped = asyncio.create_task(engine.generate([5, 6, 7], endless, handle))
    whole = SamplingParams(max_new_tokens=engines.num_long, **FREE)
    other = asyncio.create_task(engine.generate([9], whole))
    await until(lambda: engine.gauges()["num_tokens"] >= first + 100)
    handle.stop.set()
    async with asyncio.timeout(120):
        completion = await stopped
    num_tokens = len(completion.token_ids)
    assert (completion.finish_reason, 0 < num_tokens < 3900) == (FinishReason.DEADLINE, True)
    assert set(completion.policy_versions.tolist()) == {0}
    expected = chosen(logprobs_of(make_model(), [5, 6, 7], completion), completion)
    assert np.abs(expected - completion.logprobs).max() < 1e-4
    if engines.reports_tokens:
        assert 0 < handle.num_tokens <= num_tokens
    else:
        assert handle.num_tokens == -1
    assert len((await other).token_ids) == engines.num_long
    assert (
        len((await engine.generate([9], SamplingParams(max_new_tokens=2, **FREE))).token_ids) == 2
    )


async def test_a_stopped_request_that_waits_for_a_slot_is_answered_without_a_token(make_engine):
    engine = await make_engine(max_model_len=4000)
    endless = SamplingParams(max_new_tokens=3900, **FREE)
    running = [asyncio.create_task(engine.generate([5], endless)) for _ in range(4)]
    await until(lambda: engine.gauges()["num_active"] == 4)
    handle = CompletionHandle()
    waiting = asyncio.create_task(engine.generate([6], endless, handle))
    await until(lambda: engine.gauges()["num_waiting"] == 1)
    handle.stop.set()
    async with asyncio.timeout(120):
        completion = await waiting
    assert (len(completion.token_ids), completion.finish_reason) == (0, FinishReason.DEADLINE)
    assert not any(task.done() for task in running)
    for task in running:
        task.cancel()
    await until(lambda: engine.gauges()["num_active"] == 0)


async def test_an_update_in_mid_generation_keeps_requests_and_marks_every_token(
    make_engine, tmp_path
):
    engine = await make_engine(max_model_len=4000)
    update = update_to(make_model(seed=1), 1, tmp_path / "weights.safetensors")
    handle, endless = CompletionHandle(), SamplingParams(max_new_tokens=3900, **FREE)
    running = [asyncio.create_task(engine.generate(p, endless, handle)) for p in PROMPTS[:3]]
    await until(lambda: engine.gauges()["num_active"] == 3)
    report = await engine.load_weights(update)
    # More than a reading of a server elsewhere may be late.
    first = engine.gauges()["num_tokens"]
    await until(lambda: engine.gauges()["num_tokens"] >= first + 1000)
    handle.stop.set()
    completions = await asyncio.gather(*running)
    assert report.transfer_s > 0
    assert report.pause_s > 0
    assert engine.policy_version == 1
    for prompt, completion in zip(PROMPTS, completions, strict=False):
        versions = completion.policy_versions
        assert set(versions.tolist()) == {0, 1}
        assert (np.diff(versions) >= 0).all()
        switch = int((versions == 0).sum())
        before = chosen(logprobs_of(make_model(), prompt, completion), completion)[:switch]
        assert np.abs(before - completion.logprobs[:switch]).max() < 1e-4
    fresh = await engine.generate([9], SamplingParams(max_new_tokens=20, **FREE))
    expected = chosen(logprobs_of(make_model(seed=1), [9], fresh), fresh)
    assert np.abs(expected - fresh.logprobs).max() < 1e-4


async def test_prefixes_are_not_shared_across_versions(make_engine, tmp_path):
    """Of requests that an update finds sampling, waiting or yet to come, with one long prompt."""
    engine = await make_engine(max_model_len=4000)
    prompt, short = ([5, 6, 7, 8, 9] * 60)[:290], SamplingParams(max_new_tokens=8, **FREE)
    endless = SamplingParams(max_new_tokens=3500, **FREE)

    def of_one_version(version: int, completions: list[Completion]) -> None:
        for completion in completions:
            assert set(completion.policy_versions.tolist()) == {version}
            expected = chosen(logprobs_of(make_model(version), prompt, completion), completion)
            assert np.abs(expected - completion.logprobs).max() < 1e-4

    of_one_version(0, [await engine.generate(prompt, short) for _ in range(2)])
    for version in (1, 2):
        handle = CompletionHandle()
        running = [asyncio.create_task(engine.generate(prompt, endless, handle)) for _ in range(4)]
        await until(lambda: engine.gauges()["num_active"] == 4)
        waiting = [asyncio.create_task(engine.generate(prompt, short)) for _ in range(6)]
        await until(lambda: engine.gauges()["num_waiting"] == 6)
        update = update_to(make_model(version), version, tmp_path / "w.safetensors")
        await engine.load_weights(update)
        come = [asyncio.create_task(engine.generate(prompt, short)) for _ in range(2)]
        handle.stop.set()
        kept = await asyncio.gather(*running)
        of_one_version(version, await asyncio.gather(*waiting, *come))
        # The next turn of a conversation whose first was sampled by two versions.
        turn = [*prompt, *kept[0].token_ids.tolist()]
        again = await engine.generate(turn, short)
        expected = chosen(logprobs_of(make_model(version), turn, again), again)
        assert np.abs(expected - again.logprobs).max() < 1e-4


async def test_weights_of_another_model_are_refused_and_change_nothing(make_engine, tmp_path):
    engine = await make_engine()
    before = await engine.generate([9], SamplingParams(max_new_tokens=9, temperature=0.0))
    wider = make_model(intermediate_size=48)
    with pytest.raises(WeightTransferError, match=r"mlp\..*: the learner's is"):
        await engine.load_weights(update_to(wider, 1, tmp_path / "wider.safetensors"))
    deeper = make_model(num_hidden_layers=3)
    with pytest.raises(WeightTransferError, match="only the learner's model has a parameter"):
        await engine.load_weights(update_to(deeper, 1, tmp_path / "deeper.safetensors"))
    after = await engine.generate([9], SamplingParams(max_new_tokens=9, temperature=0.0))
    assert engine.policy_version == 0
    assert before.token_ids.tolist() == after.token_ids.tolist()


async def test_a_token_outside_the_vocabulary_fails_alone(make_engine):
    engine = await make_engine()
    good = asyncio.create_task(engine.generate([5], SamplingParams(max_new_tokens=8, **FREE)))
    for token in (VOCAB_SIZE, -1):
        with pytest.raises(RolloutError, match=f"the model's vocabulary has {VOCAB_SIZE}"):
            await engine.generate([5, token], SamplingParams(max_new_tokens=1))
    assert len((await good).token_ids) == 8


async def test_an_update_that_does_not_arrive_changes_nothing(make_engine, tmp_path):
    engine = await make_engine()
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0)
    before = await engine.generate([9], greedy)
    update = update_to(make_model(seed=1), 1, tmp_path / "weights.safetensors")
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(WeightTransferError, match="cannot read weights"):
        await engine.load_weights(update)
    after = await engine.generate([9], greedy)
    assert (engine.policy_version, set(after.policy_versions.tolist())) == (0, {0})
    assert before.token_ids.tolist() == after.token_ids.tolist()
    again = update_to(make_model(seed=1), 2, tmp_path / "weights.safetensors")
    await engine.load_weights(again)
    assert engine.policy_version == 2


async def test_an_update_in_shared_memory_is_loaded_if_it_is_still_there(make_engine):
    engine = await make_engine()
    learner = SharingLearner(make_model())
    await engine.load_weights(learner.update_to(make_model(seed=1), 1))
    fresh = await engine.generate([9], SamplingParams(max_new_tokens=20, **FREE))
    expected = chosen(logprobs_of(make_model(seed=1), [9], fresh), fresh)
    assert np.abs(expected - fresh.logprobs).max() < 1e-4
    late, _, newest = (learner.update_to(make_model(seed=n), n) for n in (2, 3, 4))
    with pytest.raises(WeightTransferError, match="overwritten the version before it was read"):
        await engine.load_weights(late)
    assert engine.policy_version == 1
    await engine.load_weights(newest)
    fresh = await engine.generate([9], SamplingParams(max_new_tokens=20, **FREE))
    expected = chosen(logprobs_of(make_model(seed=4), [9], fresh), fresh)
    assert np.abs(expected - fresh.logprobs).max() < 1e-4


async def test_a_closed_engine_answers_everybody(make_engine):
    engine = await make_engine(max_model_len=4000)
    sampling = SamplingParams(max_new_tokens=3000, **FREE)
    waiting = [asyncio.create_task(engine.generate([5], sampling)) for _ in range(6)]
    await asyncio.sleep(0)
    await engine.close()
    for task in waiting:
        with pytest.raises(RolloutError, match="closed"):
            await task
    with pytest.raises(RolloutError, match="closed"):
        await engine.generate([5], sampling)
