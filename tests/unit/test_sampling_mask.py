"""What top-k and top-p left of the vocabulary, from the engine that sampled to the learner."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec import structs

from actors.engines.hf.batch import HfRequest, RunningBatch
from actors.engines.hf.engine import HfEngine
from actors.episode_record import EpisodeRecord
from learners.batch.training_batch import TrainingBatch
from learners.policy.policy import Policy
from streamrl import wire
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import (
    Completion,
    FinishReason,
    PackedGroup,
    SamplingParams,
    TokenSets,
    Trajectory,
    TrajectoryGroup,
    pack,
)
from tests.rollouts import trajectories_of
from tests.tiny_model import EOS, VOCAB_SIZE, make_llama
from tests.training import make_config, make_network, make_policy, make_trainer

# The model's logits are nearly flat as it is made: sharper ones, so that top_p cuts.
SHARP = 0.05


@cache
def model() -> Any:
    """Decodes alone, so that it is made once."""
    return make_llama(0).double()


def sampled(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seed: int = 0
) -> list[tuple[tuple[int, ...], Completion]]:
    """Each prompt's completion by the decoding batch of the hf engine."""
    batch = RunningBatch(
        model(), num_slots=8, max_model_len=40, eos_token_ids=frozenset({EOS}), seed=seed
    )
    batch.join([HfRequest(prompt, sampling) for prompt in prompts], 0)
    done = batch.leave()
    while len(batch):
        batch.step(0)
        done += batch.leave()
    return [(request.prompt, completion) for request, completion in done]


def group_of(sampling: SamplingParams, seed: int = 0) -> TrajectoryGroup:
    members = []
    for prompt, completion in sampled([(5, 6, 7), (5, 6, 7), (9,), (8, 4)], sampling, seed):
        record = EpisodeRecord()
        record.add(prompt, completion)
        # A second turn: an observation of the environment, and the same completion again.
        context = (*prompt, *completion.token_ids.tolist(), 3)
        ((_, again),) = sampled([context], sampling, seed + 1)
        record.add(context, again)
        rollout = record.rollout(FinishReason.STOP, {})
        members += trajectories_of(rollout, float(len(members) % 2))
    return TrajectoryGroup(
        group_id="g", prompt_index=0, environment="test", trajectories=tuple(members)
    )


def sampling_of(temperature: float = SHARP, **changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, temperature=temperature, **changes)


def log_ratios(group: TrajectoryGroup, temperature: float = SHARP) -> torch.Tensor:
    # Decoding and packing round float32 differently, which a low temperature multiplies.
    policy = Policy(make_network(temperature).double())
    batch = TrainingBatch.of([group], policy_version=0)
    micro_batches = batch.pack(20, policy.device)
    assert len(micro_batches) > 1
    logprobs = policy.batch_logprobs(micro_batches, batch.sequences.num_tokens)
    return logprobs - batch.behavior_logprobs


def without_mask(group: TrajectoryGroup) -> TrajectoryGroup:
    members = tuple(structs.replace(t, sampling_mask=None) for t in group.trajectories)
    return structs.replace(group, trajectories=members)


@settings(max_examples=10)
@given(
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    top_k=st.sampled_from([1, 5, VOCAB_SIZE]),
    min_new_tokens=st.sampled_from([0, 3]),
    temperature=st.sampled_from([SHARP, 0.7, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_at_staleness_0_the_ratio_of_every_token_is_1(
    top_p, top_k, min_new_tokens, temperature, seed
):
    sampling = sampling_of(
        temperature,
        top_p=top_p,
        top_k=top_k,
        min_new_tokens=min_new_tokens,
        keep_sampling_mask=True,
    )
    group = group_of(sampling, seed)
    assert log_ratios(group, temperature).abs().max() < 1e-4


def test_without_the_mask_ratios_are_biased():
    sampling = sampling_of(0.7, top_p=0.9, top_k=5, keep_sampling_mask=True)
    group = group_of(sampling)
    assert log_ratios(group, 0.7).abs().max() < 1e-4
    assert log_ratios(without_mask(group), 0.7).max() < -0.03
    assert log_ratios(group_of(sampling_of(0.7, top_p=0.9, top_k=5)), 0.7).max() < -0.03


def test_the_mask_is_what_top_k_and_top_p_left():
    """Of the plain distribution, by hand."""
    sampling = sampling_of(top_p=0.9, top_k=5, keep_sampling_mask=True)
    ((prompt, completion),) = sampled([(5, 6, 7)], sampling)
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logits = make_llama(0)(ids).logits[0, len(prompt) - 1 : -1] / SHARP
    mask = completion.sampling_mask
    assert mask is not None
    for i, row in enumerate(logits):
        values, order = row.topk(5)
        probabilities = values.softmax(0)
        is_kept = probabilities.cumsum(0) - probabilities < 0.9
        assert set(mask.part(slice(i, i + 1)).token_ids) == set(order[is_kept].tolist())
    assert mask.counts.min() < mask.counts.max()


def test_nothing_is_recorded_unless_it_is_asked_for():
    group = group_of(sampling_of(top_p=0.9, top_k=5))
    assert all(t.sampling_mask is None and t.top_logprobs is None for t in group.trajectories)
    sizes = [len(wire.encode(pack(g))) for g in (group, group_of(sampling_of(top_k=5)))]
    assert abs(sizes[0] - sizes[1]) < 40 * len(group.trajectories)


def test_rows_ask_on_their_own_and_greedy_ones_have_the_whole_vocabulary():
    batch = RunningBatch(
        make_llama(0), num_slots=4, max_model_len=40, eos_token_ids=frozenset(), seed=0
    )
    asked = {
        "mask": sampling_of(top_k=3, keep_sampling_mask=True),
        "top": structs.replace(sampling_of(num_top_logprobs=4), max_new_tokens=3),
        "none": structs.replace(sampling_of(top_k=3), max_new_tokens=5),
        "greedy": sampling_of(0.0, top_k=3, keep_sampling_mask=True),
    }
    requests = {name: HfRequest((5, 6), sampling) for name, sampling in asked.items()}
    batch.join(requests.values(), 0)
    done: dict[HfRequest, Completion] = {}
    while len(batch):
        done |= dict(batch.leave())
        if len(batch):
            batch.step(0)
    found = {name: done[request] for name, request in requests.items()}
    assert found["mask"].sampling_mask is not None
    assert found["mask"].sampling_mask.counts.tolist() == [3] * 8
    assert found["mask"].top_logprobs is None
    top = found["top"].top_logprobs
    assert top is not None
    assert found["top"].sampling_mask is None
    assert top.counts.tolist() == [4] * 3
    assert (np.diff(top.logprobs.reshape(3, 4)) <= 0).all()
    assert found["none"].sampling_mask is found["none"].top_logprobs is None
    assert found["greedy"].sampling_mask is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"counts": [1], "token_ids": [4]}, "1 sets for 7 tokens"),
        ({"counts": [1, 0, 0, 0, 0, 0, 0], "token_ids": [4]}, "empty where response_mask is off"),
        ({"counts": [0, 0, 0, 1, 0, 0, 0], "token_ids": [41]}, "must be in its own set once"),
    ],
)
def test_a_mask_that_no_sampler_can_have_made_is_refused(changes, sentence):
    mask = TokenSets(*(np.array(values, np.int32) for values in changes.values()))
    with pytest.raises(ValueError, match=sentence):
        Trajectory(
            token_ids=np.arange(7, dtype=np.int32),
            response_mask=np.arange(7) >= 3,
            behavior_logprobs=np.zeros(7, np.float32),
            policy_versions=np.where(np.arange(7) >= 3, 0, -1).astype(np.int32),
            reward=0.0,
            finish_reason=FinishReason.STOP,
            sampling_mask=mask,
        )


@pytest.mark.parametrize(
    ("counts", "token_ids", "sentence"),
    [([2], [1], "add up to 2"), ([-1], [], "negative number"), ([1], [-1], "negative id")],
)
def test_sets_that_do_not_add_up_are_refused(counts, token_ids, sentence):
    with pytest.raises(ValueError, match=sentence):
        TokenSets(np.array(counts, np.int32), np.array(token_ids, np.int32))


def test_a_group_keeps_its_sets_on_the_wire():
    sampling = sampling_of(top_p=0.9, top_k=5, keep_sampling_mask=True, num_top_logprobs=3)
    group = group_of(sampling)
    one = structs.replace(group.trajectories[1], sampling_mask=None)
    mixed = structs.replace(group, trajectories=(group.trajectories[0], one))
    for original in (group, mixed):
        copy = wire.decode(wire.encode(pack(original)), PackedGroup).group()
        for ours, theirs in zip(original.trajectories, copy.trajectories, strict=True):
            for name in ("sampling_mask", "top_logprobs"):
                sets, kept = getattr(ours, name), getattr(theirs, name)
                if sets is None:
                    assert kept.counts.tolist() == [0] * ours.num_tokens
                    continue
                for field in sets.__struct_fields__:
                    assert np.array_equal(getattr(sets, field), getattr(kept, field))


def test_the_gradient_is_that_of_a_dense_softmax_over_the_mask():
    sampling = sampling_of(top_p=0.9, top_k=5, keep_sampling_mask=True)
    group = group_of(sampling)
    policy = make_policy(SHARP)
    batch = TrainingBatch.of([group], policy_version=0)
    micro_batch = batch.micro_batch(range(len(batch)), policy.device)
    output = policy(micro_batch, with_entropy=True)
    weights = torch.linspace(-1, 1, len(output.logprobs))
    (weights * (output.logprobs + 0.1 * output.entropy)).sum().backward()
    plain, total = make_llama(0), torch.zeros(())
    start = 0
    for trajectory in group.trajectories:
        ids = torch.from_numpy(trajectory.token_ids).long()
        logits = plain(ids[None]).logits[0].float() / SHARP
        for place in np.flatnonzero(trajectory.response_mask):
            kept = trajectory.sampling_mask.part(slice(place, place + 1)).token_ids
            row = torch.full((VOCAB_SIZE,), -torch.inf)
            row[kept] = logits[place - 1, kept]
            logprobs = row.log_softmax(0)
            entropy = -(logprobs[kept].exp() * logprobs[kept]).sum()
            total = total + weights[start] * (logprobs[ids[place]] + 0.1 * entropy)
            start += 1
    total.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in policy.parameters().items():
        # Sums of float32, in an order that the processor chooses: the largest is 80.
        atol = 3e-5 * float(expected[name].abs().max())
        assert torch.allclose(parameter.grad, expected[name], atol=atol, rtol=1e-3), name


def test_a_trajectory_without_a_mask_has_the_whole_vocabulary_beside_others():
    group = group_of(sampling_of(top_k=5, keep_sampling_mask=True))
    whole = group_of(sampling_of(), seed=3)
    members = (group.trajectories[0], whole.trajectories[0], group.trajectories[1])
    mixed = structs.replace(group, trajectories=members)
    assert log_ratios(mixed).abs().max() < 1e-4


@pytest.mark.parametrize("algorithm", [{}, {"proximal": "behavior"}, {"kl_loss": {"coef": 0.1}}])
def test_packed_is_unpacked_and_the_step_says_how_much_was_replayed(algorithm):
    group = group_of(sampling_of(top_p=0.9, top_k=5, keep_sampling_mask=True))
    found = []
    for max_tokens in (30, 10_000):
        config = make_config(
            algorithm={**algorithm, "entropy_coef": 0.01},
            generator={"temperature": SHARP, "top_k": 5, "keep_sampling_mask": True},
            learner={"max_tokens_per_micro_batch": max_tokens},
        )
        trainer = make_trainer(config)
        metrics = trainer.step(TrainingBatch.of([group], policy_version=0))
        found.append((metrics, {n: p.detach() for n, p in trainer.policy.parameters().items()}))
    (one, weights), (other, same) = found
    assert one["learner/num_micro_batches"] > other["learner/num_micro_batches"]
    assert one["actor/sampling_masked_token_frac"] == pytest.approx(1.0)
    assert 1 < one["actor/sampling_mask_size"] < 5
    assert one["actor/entropy"] == pytest.approx(other["actor/entropy"], rel=1e-4)
    for name, parameter in weights.items():
        assert torch.allclose(parameter, same[name], atol=1e-5), name


async def test_the_engine_gives_what_the_configuration_asks_for():
    engine = HfEngine(
        make_llama(0), eos_token_ids=frozenset({EOS}), max_num_seqs=2, max_model_len=32
    )
    sampling = sampling_of(top_k=4, keep_sampling_mask=True, num_top_logprobs=2)
    async with asyncio.timeout(120):
        completion = await engine.generate([5, 6], sampling)
    await engine.close()
    assert completion.sampling_mask is not None
    assert set(completion.sampling_mask.counts) == {4}
    assert completion.top_logprobs is not None


def test_a_mask_without_a_bound_is_refused():
    settings = {
        "model": {"path": "a"},
        "data": {"source": "addition"},
        "generator": {"keep_sampling_mask": True, "top_p": 0.9},
    }
    with pytest.raises(ValueError, match=r"generator\.top_k 0 sets no bound to them: set top_k"):
        RunConfig.model_validate(settings)


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 6, "top_p": 0.9, "keep_sampling_mask": True}])
def test_on_policy_dppo_over_candidates_has_the_gradient_of_no_correction(loss, cuts):
    group = group_of(sampling_of(num_top_logprobs=4, **cuts))
    found = []
    for algorithm in (
        {"rollout_is": "off"},
        {"loss": loss, "proximal": "behavior", "loss_config": {"divergence_topk": 4}},
    ):
        generator = {"temperature": SHARP, **cuts}
        config = make_config(
            algorithm=algorithm, generator=generator, optimizer={"max_grad_norm": None}
        )
        trainer = make_trainer(config)
        trainer.accumulate(TrainingBatch.of([group], policy_version=0))
        found.append({n: p.grad.clone() for n, p in trainer.policy.parameters().items()})
        assert trainer.update()["actor/pg_clipfrac"] == 0
    for name, gradient in found[0].items():
        # The ratio to the engine's log-probabilities is 1 but for rounding.
        assert torch.allclose(gradient, found[1][name], rtol=1e-3, atol=1e-5), name


def test_candidates_see_a_change_that_the_sampled_token_does_not():
    """The policy has moved: tokens whose own probability stayed are masked for their candidates."""
    group = group_of(sampling_of(0.5, num_top_logprobs=8))
    fractions = []
    for topk in (0, 8):
        config = make_config(
            algorithm={
                "loss": "dppo_tv",
                "proximal": "behavior",
                "loss_config": {
                    "divergence_topk": topk,
                    "clip_ratio_low": 0.1,
                    "clip_ratio_high": 0.1,
                },
            },
            generator={"temperature": 0.5},
        )
        trainer = make_trainer(config)
        for parameter in trainer.policy.parameters().values():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.data += 0.02 * noise
        fractions.append(trainer.step(TrainingBatch.of([group], 0))["actor/pg_clipfrac"])
    assert 0 < fractions[0] < fractions[1] < 1


def test_a_group_without_the_candidates_of_the_loss_is_named():
    config = make_config(
        algorithm={
            "loss": "dppo_tv",
            "proximal": "behavior",
            "loss_config": {"divergence_topk": 4},
        }
    )
    trainer = make_trainer(config)
    with pytest.raises(ConfigError, match="divergence_topk: was 4, and groups came without"):
        trainer.step(TrainingBatch.of([group_of(sampling_of())], policy_version=0))


def test_candidates_of_another_policy_are_refused():
    with pytest.raises(ValueError, match=r"algorithm.proximal recompute has another policy"):
        make_config(algorithm={"loss": "dppo_kl", "loss_config": {"divergence_topk": 4}})


def test_a_micro_batch_of_some_trajectories_has_their_sets():
    """Of the others nothing is left: selection is how sequences that are not finite leave."""
    group = group_of(sampling_of(top_k=5, keep_sampling_mask=True, num_top_logprobs=3))
    policy = make_policy(SHARP)
    batch = TrainingBatch.of([group], policy_version=0)
    whole = batch.micro_batch(range(len(batch)), policy.device)
    is_kept = torch.tensor([True, False, False, True])
    rows = whole.sequences.expand(is_kept)
    part = whole.select(is_kept)
    assert torch.allclose(policy(part).logprobs, policy(whole).logprobs[rows], atol=1e-5)
    expected = policy(whole, with_top_logprobs=True).top_logprobs[rows[whole.top_candidates.owners]]
    assert torch.allclose(policy(part, with_top_logprobs=True).top_logprobs, expected, atol=1e-4)
