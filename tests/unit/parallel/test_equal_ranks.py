"""One rank, two and four, and another device than the CPU, make the same steps, whatever the
algorithm needs of the whole batch."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from learners.batch.packing import share
from learners.batch.training_batch import TrainingBatch
from learners.parallel.mesh import full, make_mesh
from learners.parallel.ranks import Ranks
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.config.learner import MeshSettings
from streamrl.types import FinishReason, GroupHeader, TrajectoryGroup, Turn
from tests.pretended_device import pretended
from tests.ranks import run_ranks
from tests.records import with_candidates, with_experts
from tests.training import (
    make_config,
    make_groups,
    make_trainer,
    observing,
    poison,
    poisoned,
    segmented,
    with_metrics,
)

TWICE = {"updates_per_batch": 2, "epochs": 2}
CASES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "sequence-mean": {"loss_config": {"loss_agg_mode": "seq-mean-token-mean"}},
    "sum-norm": {"loss_config": {"loss_agg_mode": "seq-mean-token-sum-norm"}},
    "kept": {
        "rollout_is": {"mode": "mask", "threshold": 1.5, "normalize_by": "kept"},
    },
    "batch-normalize": {"rollout_is": {"threshold": 2.0, "batch_normalize": True}},
    "kl-reward": {"kl_reward": {"coef": 0.1, "controller": "adaptive"}},
    "exact-kl": {"kl_loss": {"coef": 0.1, "kind": "full"}},
    "gae": {"advantage": "gae"},
    "entropy": {"entropy_coef": 0.01},
    "whitened": {"advantage_config": {"whiten": True}, "reward": {"norm_mean": "running"}},
    "remax": {"advantage": "remax"},
    "resampled": {"pf_ppo": {}},
    "parts": {"rollout_is": "token_is"},
    "stream-parts": {"preset": "stream", "loss_config": {"lambda_pos": 0.5, "lambda_neg": 0.5}},
    "loglinear": {"proximal": "loglinear", "rollout_is": {"threshold": 2, "batch_normalize": True}},
    "updates": {"learner": TWICE, "loss_config": {"clip_ratio_high": 0.01}},
    "updates-gae": {"learner": TWICE, "advantage": "gae", "reward": {"difficulty_high": 0.5}},
    "updates-bypass": {
        "learner": TWICE,
        "proximal": "behavior",
        "rollout_is": {"rejection": [{"token_k1": 20}], "normalize_by": "kept"},
    },
    "m2po": {"rollout_is": "m2po"},
    "m2po-bypass": {"proximal": "behavior", "rollout_is": {"second_moment": 4.0}},
    "updates-m2po": {"learner": TWICE, "rollout_is": {"second_moment": 4.0, "scale_lr": True}},
    "vcpo": {"rollout_is": "vcpo", "advantage": "opob"},
    "vespo": {"loss": "vespo", "proximal": "behavior", "loss_config": {"lambda_pos": 0.5}},
    "otb": {"advantage": "otb"},
    "maxrl-luspo": {"advantage": "maxrl", "loss": "luspo", "learner": TWICE},
    "gdpo": {
        "advantage": "gdpo",
        "advantage_config": {"rewards": {"place": 1.0, "score": -0.5}},
        "proximal": "linear",
        "rollout_is": {"threshold": 2, "batch_normalize": True},
    },
    "gigpo": {
        "advantage": "gigpo",
        "loss": "dppo_tv",
        "proximal": "behavior",
        "loss_config": {"log_ratio_coef": 0.1},
    },
    "echo": {"echo_coef": 0.5, "rollout_is": {"mode": "mask", "threshold": 1.5}},
    "updates-echo": {
        "learner": TWICE,
        "echo_coef": 0.5,
        "loss_config": {"loss_agg_mode": "seq-mean-token-mean"},
    },
    "not-finite-echo": {"echo_coef": 0.5},
    "rae": {"advantage": "rae", "advantage_config": {"role": "score", "decay": 0.8}},
    "segments": {"advantage": "reinforce_plus_plus", "reward": {"placement": "turn"}},
    "candidates": {
        "loss": "dppo_tv",
        "proximal": "behavior",
        "loss_config": {"divergence_topk": 4, "clip_ratio_high": 0.02, "clip_ratio_low": 0.02},
        "entropy_coef": 0.01,
        "kl_loss": {"coef": 0.1},
    },
    "router-replay": {"router_replay": "replay", "kl_loss": {"coef": 0.1}},
    "teachers": {
        "distillation": {
            "teachers": [{"name": "a", "path": "t"}, {"name": "b", "path": "t"}],
            **{"column": "teacher", "reward_coef": 0.5, "student": "proximal"},
            "template": "{{prompt}}",
        },
    },
    "teachers-candidates": {
        "distillation": {"teachers": [{"path": "t"}], "top_k": 5, "template": "{{prompt}}"},
    },
    "teachers-forward-parts": {
        "distillation": {
            "teachers": [{"name": "a", "path": "t"}, {"name": "b", "path": "t"}],
            **{"column": "teacher", "reward_coef": 0.5, "top_k": 3, "divergence": "forward_kl"},
        },
        "entropy_coef": 0.01,
    },
    "updates-taught": {
        "learner": TWICE,
        "distillation": {"teachers": [{"path": "t"}], "top_k": 3, "coef": 0.3},
        "loss": "reinforce",
    },
    "teachers-parts": {"distillation": {"teachers": [{"path": "t"}]}},
    "rescored": {
        "rescore_share": 0.6,
        "rollout_is": {"mode": "mask", "threshold": 9.0, "engine_threshold": 9, "lag_threshold": 2},
    },
    "updates-rescored": {
        "learner": TWICE,
        "rescore_share": 1.0,
        "rollout_is": {"engine_threshold": 2.0, "batch_normalize": True},
    },
    "not-finite": {},
    "not-finite-critic": {"advantage": "gae", "value": {"max_tokens_per_micro_batch": 40}},
    "not-finite-kl": {"kl_reward": {"coef": 0.1, "controller": "adaptive"}},
}
LASTING = ("token-mean", "gae", "kl-reward", "not-finite-kl", "rae", "whitened")
"""Whose first step leaves something to the second: moments, running means, a coefficient."""
# Some ranks have none of them, and of four ranks one has no other.
NOT_FINITE = ((1, 0), (1, 2), (4, 0), (4, 1), (4, 2))
# Of how the work was divided; times and rates are of one process.
UNEQUAL = ("learner/num_micro_batches",)


def configure(case: dict[str, Any]) -> RunConfig:
    """The algorithm, and beside it what differs in the learner."""
    algorithm = {name: value for name, value in case.items() if name != "learner"}
    learner = {"max_tokens_per_micro_batch": 70, **case.get("learner", {})}
    # With the usual eps AdamW makes a step of a gradient that is zero but for its rounding.
    optimizer, generator = {"eps": 1e-5}, {"environment": "tools"}
    return make_config(
        algorithm=algorithm, learner=learner, optimizer=optimizer, generator=generator
    )


def of_turns(group: TrajectoryGroup) -> TrajectoryGroup:
    """In segments, of which the first is one rewarded turn, half of it in the loss."""
    group = segmented(group)
    first, *others = group.trajectories
    count, mask = first.num_response_tokens, first.response_mask.copy()
    mask[-(count // 2) or len(mask) :] = False
    turn = Turn(
        num_observation_tokens=0,
        num_completion_tokens=count,
        finish_reason=FinishReason.STOP,
        reward=1.0,
    )
    first = structs.replace(first, turns=(turn,), loss_mask=mask)
    return structs.replace(group, trajectories=(first, *others))


def make_step(step: int, *, is_finite: bool = True) -> list[TrajectoryGroup]:
    """Groups of uneven lengths."""
    groups = make_groups(seed=step, num_groups=6, group_size=3)
    groups = groups if is_finite else poisoned(groups, *NOT_FINITE)
    groups = [with_metrics(g, greedy_reward=0.1 * i, difficulty=0.1) for i, g in enumerate(groups)]
    return list(map(with_own_metrics, groups))


def with_own_metrics(group: TrajectoryGroup) -> TrajectoryGroup:
    """Two rewards that differ among siblings."""
    members = tuple(
        structs.replace(t, metrics={**t.metrics, "place": float(i), "score": float(i % 2)})
        for i, t in enumerate(group.trajectories)
    )
    return structs.replace(group, trajectories=members)


def train(name: str, trainer: Trainer, ranks: Ranks) -> list[dict[str, float]]:
    """The metrics of each step; a first part of one group leaves the other ranks without any."""
    is_finite, metrics = not name.startswith("not-finite"), []
    if not is_finite:
        poison(trainer)
    cuts = (slice(0, 1), slice(1, None)) if name.endswith("parts") else (slice(None),)
    for step in range(2 if name in LASTING else 1):
        groups = make_step(step, is_finite=is_finite)
        groups = list(map(of_turns, groups)) if name == "segments" else groups
        groups = list(map(observing, groups)) if name.endswith("echo") else groups
        groups = [with_candidates(g, 9, 4) for g in groups] if name == "candidates" else groups
        groups = list(map(with_experts, groups)) if name == "router-replay" else groups
        for cut in cuts:
            trainer.accumulate(share_of(groups[cut], step, ranks))
        metrics.append(trainer.update())
    return metrics


def share_of(groups: Sequence[TrajectoryGroup], step: int, ranks: Ranks) -> TrainingBatch:
    headers = [GroupHeader.of(group) for group in groups]
    mine = {header.group_id for header in share(headers, ranks.count, ranks.index)}
    fetched = [group for group in groups if group.group_id in mine]
    return TrainingBatch.shared(headers, fetched, step, ranks)


def on_rank() -> dict[str, Any]:
    mesh = make_mesh(MeshSettings(), torch.device("cpu"))
    ranks = Ranks.of(dist.new_group(backend="gloo"))
    return {
        name: outcome(name, make_trainer(configure(CASES[name]), mesh, ranks), ranks)
        for name in CASES
    }


def on_a_device() -> dict[str, Any]:
    results = {}
    with pretended() as device:
        for name in CASES:
            with device:
                trainer = make_trainer(configure(CASES[name]))
            assert trainer.policy.device == device
            results[name] = outcome(name, trainer, Ranks())
    return results


def outcome(name: str, trainer: Trainer, ranks: Ranks) -> tuple[Any, ...]:
    """Metrics of the steps, trained parameters, and what the credit keeps."""
    metrics = train(name, trainer, ranks)
    whole = {name: full(parameter).cpu() for name, parameter in parameters_of(trainer).items()}
    return metrics, whole, trainer.credit.state_dict()


def parameters_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    critic = trainer.critic.parameters() if trainer.critic else {}
    return {**trainer.policy.parameters(), **{f"c.{name}": p for name, p in critic.items()}}


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """Of two; `test_equal_meshes.py` has four."""
    return run_ranks(on_rank, 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """In a process of its own: torch learns of devices before its first backward pass alone."""
    return run_ranks(on_a_device, 1, tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_and_another_device_make_the_steps_of_one(by_rank, elsewhere, name):
    trainer = make_trainer(configure(CASES[name]))
    expected = train(name, trainer, Ranks())
    parameters = parameters_of(trainer)
    for results in (*by_rank, *elsewhere):
        metrics, trained, state = results[name]
        for parameter, tensor in parameters.items():
            # The one row that `poison` sets is equal as well.
            torch.testing.assert_close(
                trained[parameter], tensor.data, rtol=1e-5, atol=1e-5, equal_nan=True
            )
        for ours, theirs in zip(metrics, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for metric in theirs.keys() - set(UNEQUAL):
                if metric.endswith("_s"):
                    continue
                close = math.isclose(ours[metric], theirs[metric], rel_tol=1e-4, abs_tol=1e-5)
                assert close, (metric, ours[metric], theirs[metric])
            num_nonfinite = len(NOT_FINITE) if name.startswith("not-finite") else 0
            assert ours["learner/num_nonfinite_sequences"] == num_nonfinite
            assert ours["learner/skipped_update"] == 0
        assert state == pytest.approx(trainer.credit.state_dict(), rel=1e-5)
