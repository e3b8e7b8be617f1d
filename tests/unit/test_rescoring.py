"""The learner scores tokens under its own weights of the version that sampled them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from actors.engines.hf.engine import load_model
from learners.batch.training_batch import TrainingBatch
from learners.objective.rescoring import is_chosen
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import Completion, FinishReason, SamplingParams, Trajectory, TrajectoryGroup
from tests.research.exact_lag import ReloadedEngine
from tests.tiny_model import save_llama
from tests.training import make_config, make_groups, make_policy, make_trainer

NUM_KEPT = 3


def configure(share: float = 1.0, **sections: Any) -> RunConfig:
    algorithm = {"rollout_is": "token_is", "rescore_share": share, **sections.pop("algorithm", {})}
    return make_config(algorithm=algorithm, buffer={"max_staleness": NUM_KEPT}, **sections)


def sampled_by(
    trainer: Trainer, version: int, seed: int = 0, rise: float = 0.0
) -> list[TrajectoryGroup]:
    """Groups with the trainer's log-probabilities of now, raised by what an engine would differ."""
    groups = make_groups(seed)
    logprobs = trainer.logprobs(TrainingBatch.of(groups, version)).numpy() + np.float32(rise)
    start, made = 0, []
    for group in groups:
        members = []
        for t in group.trajectories:
            behavior, versions = t.behavior_logprobs.copy(), t.policy_versions.copy()
            count = t.num_response_tokens
            behavior[t.response_mask] = logprobs[start : start + count]
            versions[t.response_mask] = version
            start += count
            members.append(structs.replace(t, behavior_logprobs=behavior, policy_versions=versions))
        made.append(structs.replace(group, trajectories=tuple(members)))
    return made


def run(
    config: RunConfig, lag: int, rise: float = 0.0, num_steps: int = 5
) -> list[dict[str, float]]:
    """Steps on groups that the trainer's weights of `lag` versions before have sampled."""
    trainer, waiting, lines = make_trainer(config), list[Sequence[TrajectoryGroup]](), []
    for version in range(num_steps):
        waiting.append(sampled_by(trainer, version, version, rise))
        batch = TrainingBatch.of(waiting[max(0, version - lag)], version)
        lines.append(trainer.step(batch))
    return lines


PROXIMAL = ("recompute", "behavior", "loglinear")


@pytest.mark.parametrize("proximal", PROXIMAL)
@pytest.mark.parametrize("lag", [0, 1, NUM_KEPT])
def test_a_faithful_engine_has_no_mismatch_and_all_is_lag(lag: int, proximal: str) -> None:
    last = run(configure(algorithm={"proximal": proximal}), lag)[-1]
    assert last["mismatch/rescored_frac"] == 1
    assert last["mismatch/engine_k3_kl"] < 1e-10
    # Under loglinear the policy that weights compare stands between behavior and current.
    assert (last["mismatch/lag_k3_kl"] > 1e-5) == (lag > 0)
    both = last["mismatch/engine_kl"] + last["mismatch/lag_kl"]
    assert both == pytest.approx(last["mismatch/mismatch_kl"], abs=1e-7)


@pytest.mark.parametrize("learner", [{}, {"updates_per_batch": 2}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("lag", [0, 2])
def test_what_an_engine_differs_by_is_mismatch_at_every_lag(lag: int, learner: Any) -> None:
    last = run(configure(learner=learner), lag, rise=0.25)[-1]
    assert last["mismatch/engine_kl"] == pytest.approx(0.25, abs=1e-5)
    assert (last["mismatch/lag_k3_kl"] > 1e-6) == (lag > 0)


def test_a_version_whose_weights_are_gone_is_not_scored() -> None:
    lines = run(configure(), NUM_KEPT + 1)
    assert [line["mismatch/rescored_frac"] for line in lines] == [1, 1, 1, 1, 0]
    assert "mismatch/lag_kl" not in lines[-1]
    # The checkpoint that a learner began from may be newer, or older, than a group.
    trainer = make_trainer(configure())
    groups = [*sampled_by(trainer, 4), *sampled_by(trainer, 7)]
    assert trainer.step(TrainingBatch.of(groups, 5))["mismatch/rescored_frac"] == 0


def test_of_a_trajectory_only_the_tokens_of_a_known_version_are_scored() -> None:
    trainer = make_trainer(configure())
    batch = TrainingBatch.of(sampled_by(trainer, 5), 5)
    starts = batch.sequences.lengths.cumsum(0) - batch.sequences.lengths
    batch.policy_versions[starts] = 0
    known = 1 - len(batch) / batch.sequences.num_tokens
    assert trainer.step(batch)["mismatch/rescored_frac"] == pytest.approx(known)


def test_the_chosen_groups_are_a_share_of_any_stream() -> None:
    for share in (0.1, 0.25, 0.5):
        for period in (1, 2, 7):
            chosen = [is_chosen(i, share) for i in range(0, 1000 * period, period)]
            assert sum(chosen) / len(chosen) == pytest.approx(share, abs=0.01)
    assert all(is_chosen(i, 1.0) for i in range(1000))
    line = run(configure(0.5), 1)[-1]
    batch = TrainingBatch.of(make_groups(), 0)
    chosen = torch.tensor([is_chosen(i, 0.5) for i in batch.prompt_indices])
    assert 0 < chosen.float().mean() < 1
    tokens = batch.sequences.expand(chosen).float().mean()
    groups = make_groups(3)
    tokens = TrainingBatch.of(groups, 0).sequences.expand(chosen).float().mean()
    assert line["mismatch/rescored_frac"] == pytest.approx(float(tokens))


@pytest.mark.parametrize("section", [{}, {"advantage": "opob", "loss": "vespo"}])
@pytest.mark.parametrize("learner", [{}, {"lora": {"rank": 2}}, {"dtype": "bfloat16"}])
def test_scoring_changes_no_update(section: Any, learner: Any) -> None:
    def trained(share: float) -> dict[str, torch.Tensor]:
        trainer = make_trainer(configure(share, algorithm=section, learner=learner))
        waiting = [sampled_by(trainer, 0, seed) for seed in range(2)]
        for version, groups in enumerate(waiting):
            trainer.step(TrainingBatch.of(groups, version))
        return {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}

    plain, scored = trained(0.0), trained(1.0)
    for name, parameter in plain.items():
        assert torch.equal(parameter, scored[name]), name


def test_a_mask_on_the_factor_of_the_engine_silences_it_alone() -> None:
    """Where the ratio of the loss holds the correction, too."""
    for section in ({}, {"advantage": "opob", "loss": "vespo", "proximal": "behavior"}):
        rule = {"mode": "mask", "threshold": 1e3, "engine_threshold": 1.2}
        config = configure(algorithm={**section, "rollout_is": rule})
        assert run(config, 1, rise=0.1)[-1]["actor/trained_token_frac"] == 1
        assert run(config, 1, rise=0.3)[-1]["actor/trained_token_frac"] == 0


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"rescore_share": 1.5}, "rescore_share"),
        ({"rescore_share": 0.5, "rollout_is": "off"}, "rollout_is: metrics_only"),
        ({"rollout_is": {"lag_threshold": 2.0}}, "set algorithm.rescore_share"),
        ({"rescore_share": 0.5, "rollout_is": {"lag_threshold": 1.0}}, "greater than 1"),
        (
            {"rescore_share": 0.5, "preset": "stream", "rollout_is": {"engine_threshold": 2.0}},
            "algorithm.rollout_is.mode=mask",
        ),
        (
            {"rescore_share": 0.5, "rollout_is": {"engine_threshold": 2.0, "apply": False}},
            "algorithm.rollout_is.mode=mask",
        ),
    ],
)
def test_what_cannot_act_is_refused(section: Any, sentence: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=sentence):
        make_config(algorithm=section)


NUM_SIBLINGS = 4
PROMPTS = ((5, 6, 7), (8, 9), (10, 11, 12, 13))
ENGINES: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, float32 head": {"dtype": "bfloat16", "lm_head_dtype": "float32"},
}


def raise_logits(model: torch.nn.Module) -> None:
    """All by about as much, as in trained models, through one large activation of every token: a
    softmax does not see it, and rounding of logits does (MiniMax-M1, arXiv 2506.13585, 3.2)."""
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 20.0
        model.get_output_embeddings().weight[:, 0] = 16.0


def recorded(index: int, prompt: Sequence[int], replies: Sequence[Completion]) -> TrajectoryGroup:
    """The group of these replies, with rewards that differ."""
    members = []
    for i, reply in enumerate(replies):
        mask = np.arange(len(prompt) + len(reply.token_ids)) >= len(prompt)
        behavior, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
        behavior[mask], versions[mask] = reply.logprobs, reply.policy_versions
        trajectory = Trajectory(
            token_ids=np.concatenate([np.array(prompt, np.int32), reply.token_ids]),
            response_mask=mask,
            behavior_logprobs=behavior,
            policy_versions=versions,
            reward=float(i % 2),
            finish_reason=FinishReason.LENGTH,
        )
        members.append(trajectory)
    return TrajectoryGroup(
        group_id=str(index), prompt_index=index, environment="test", trajectories=tuple(members)
    )


async def measured(path: Path, engine: dict[str, str], lag: int) -> dict[str, float]:
    """Means over the steps on what an engine sampled with the weights of `lag` versions before."""
    config = make_config(
        model={"path": str(path)},
        generator={"max_new_tokens": 12, "device": "cpu", **engine},
        buffer={"max_staleness": lag},
        optimizer={"lr": 1e-4},
        algorithm={"rollout_is": "token_is", "rescore_share": 1.0},
    )
    trainer = Trainer(config, make_policy())
    raise_logits(trainer.policy.model)
    sampler = ReloadedEngine.from_config(config, seed=0)
    waiting: list[list[TrajectoryGroup]] = []
    lines = []
    try:
        for version in range(lag + 3):
            weights = trainer.policy.weights()
            sampler.reload({name: w.detach().clone() for name, w in weights.items()}, version)
            sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
            prompts = [prompt for prompt in PROMPTS for _ in range(NUM_SIBLINGS)]
            asked = [sampler.generate(prompt, sampling) for prompt in prompts]
            replies = await sampler.generate_together(asked)
            waiting.append(
                [
                    recorded(i, prompt, replies[i * NUM_SIBLINGS : (i + 1) * NUM_SIBLINGS])
                    for i, prompt in enumerate(PROMPTS)
                ]
            )
            batch = TrainingBatch.of(waiting[max(0, version - lag)], version)
            lines.append(await asyncio.to_thread(trainer.step, batch))
    finally:
        await sampler.close()
    names = ("rescored_frac", "engine_k3_kl", "lag_k3_kl", "mismatch_k3_kl")
    return {
        name: float(np.mean([line[f"mismatch/{name}"] for line in lines[lag:]])) for name in names
    }


async def test_a_bfloat16_engine_shows_in_the_mismatch_and_versions_in_the_lag(tmp_path, capsys):
    """Prints the table of tests/benchmarks/lag.md."""
    save_llama(tmp_path)
    model = load_model(make_config(model={"path": str(tmp_path)}))
    raise_logits(model)
    model.save_pretrained(tmp_path)
    found = {
        (name, lag): await measured(tmp_path, engine, lag)
        for lag in (0, 8)
        for name, engine in ENGINES.items()
    }
    with capsys.disabled():
        for (name, lag), line in found.items():
            numbers = (f"{line[n]:.1e}" for n in ("engine_k3_kl", "lag_k3_kl", "mismatch_k3_kl"))
            print("|", " | ".join((name, str(lag), *numbers)), "|")
    assert all(line["rescored_frac"] == 1 for line in found.values())
    for lag in (0, 8):
        exact, rounded, head = (found[name, lag]["engine_k3_kl"] for name in ENGINES)
        assert exact < 1e-8
        assert rounded > 1e-5
        assert head < 0.5 * rounded
        assert all((found[name, lag]["lag_k3_kl"] > 1e-6) == (lag > 0) for name in ENGINES)
    assert found["float32", 8]["lag_k3_kl"] == pytest.approx(
        found["float32", 8]["mismatch_k3_kl"], rel=1e-3
    )
