"""A trainer on the tiny model and batches for it."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import structs

from learners.batch.micro_batch import MicroBatch
from learners.batch.training_batch import TrainingBatch
from learners.parallel.mesh import Mesh, assign, full
from learners.parallel.ranks import Ranks
from learners.policy.critic import Critic
from learners.policy.loading import distribute
from learners.policy.network import Network
from learners.policy.policy import Policy
from learners.policy.sharding import compute_in
from learners.policy.teachers import Teachers
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.types import FinishReason, Trajectory, TrajectoryGroup, episode_indices
from tests.model_families import make_model
from tests.tiny_model import make_llama

POISON = 1
"""No id of `make_groups`. After `poison`, what follows it in a trajectory is not finite."""


def make_config(**sections: Any) -> RunConfig:
    learner = {"max_tokens_per_micro_batch": 10_000, **sections.pop("learner", {})}
    return RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"source": "addition", "max_prompt_length": 10},
            "generator": {"max_new_tokens": 10, **sections.pop("generator", {})},
            "learner": {"optimizer": {"lr": 1e-3, **sections.pop("optimizer", {})}, **learner},
            **sections,
        }
    )


def make_policy(temperature: float = 1.0, **overrides: object) -> Policy:
    return Policy(make_network(temperature, **overrides))


def make_network(
    temperature: float = 1.0,
    *,
    has_values: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Network:
    model = make_llama(**overrides).train()
    network = Network(model, temperature=temperature, has_values=has_values)
    compute_in(network, dtype)
    return network


def make_critic(config: RunConfig) -> Critic:
    return Critic(config, make_network(has_values=True))


def make_trajectory(rng: np.random.Generator, num_prompt: int, num_response: int) -> Trajectory:
    mask = np.arange(num_prompt + num_response) >= num_prompt
    return Trajectory(
        token_ids=rng.integers(2, 40, len(mask)).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -rng.exponential(3.0, len(mask)), 0).astype(np.float32),
        policy_versions=np.where(mask, rng.integers(0, 4, len(mask)), -1).astype(np.int32),
        reward=float(rng.random()),
        finish_reason=FinishReason.STOP,
    )


def make_micro_batch(lengths: Sequence[int], seed: int = 0) -> MicroBatch:
    """Random sequences, of which each token but the first is a response."""
    rng = np.random.default_rng(seed)
    trajectories = tuple(make_trajectory(rng, 1, length - 1) for length in lengths)
    group = TrajectoryGroup(
        group_id="", prompt_index=0, environment="test", trajectories=trajectories
    )
    batch = TrainingBatch.of([group], policy_version=4)
    return batch.micro_batch(range(len(lengths)), torch.device("cpu"))


def make_groups(
    seed: int = 0, num_groups: int = 5, group_size: int = 4
) -> tuple[TrajectoryGroup, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        TrajectoryGroup(
            group_id=str(i),
            prompt_index=i,
            environment="test",
            teacher="ab"[i % 2],
            teacher_prompt=np.arange(2, 3 + i, dtype=np.int32),
            trajectories=tuple(
                make_trajectory(rng, int(rng.integers(1, 9)), int(rng.integers(1, 12)))
                for _ in range(group_size)
            ),
        )
        for i in range(num_groups)
    )


def sibling_batch(groups: Sequence[tuple[int, Sequence[int]]]) -> TrainingBatch:
    """Of groups given as the tokens of the prompt, and of the responses to it."""
    rng = np.random.default_rng(0)
    made = []
    for i, (num_prompt, responses) in enumerate(groups):
        prompt = rng.integers(2, 40, num_prompt)
        siblings = tuple(_sibling(rng, prompt, num) for num in responses)
        made.append(
            TrajectoryGroup(
                group_id=str(i), prompt_index=i, environment="test", trajectories=siblings
            )
        )
    return TrainingBatch.of(made, policy_version=4)


def _sibling(rng: np.random.Generator, prompt: np.ndarray, num_response: int) -> Trajectory:
    mask = np.arange(len(prompt) + num_response) >= len(prompt)
    return Trajectory(
        token_ids=np.concatenate([prompt, rng.integers(2, 40, num_response)]).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
        reward=float(rng.random()),
        finish_reason=FinishReason.STOP,
    )


def with_metrics(group: TrajectoryGroup, **metrics: float) -> TrajectoryGroup:
    """The group with these metrics of each trajectory."""
    members = tuple(structs.replace(t, metrics=metrics) for t in group.trajectories)
    return structs.replace(group, trajectories=members)


def observing(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with the middle third of each response read, not sampled: two turns."""
    members = []
    for t in group.trajectories:
        sampled = np.flatnonzero(t.response_mask)
        third = len(sampled) // 3
        mask = t.response_mask.copy()
        mask[sampled[third : 2 * third]] = False
        members.append(
            structs.replace(
                t,
                response_mask=mask,
                behavior_logprobs=np.where(mask, t.behavior_logprobs, 0).astype(np.float32),
                policy_versions=np.where(mask, t.policy_versions, -1).astype(np.int32),
            )
        )
    return structs.replace(group, trajectories=tuple(members))


def segmented(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with two segments for each episode that has two tokens."""
    episodes = [list(_halves(t)) for t in group.trajectories]
    return structs.replace(
        group,
        trajectories=tuple(segment for episode in episodes for segment in episode),
        episode_indices=episode_indices(map(len, episodes)),
    )


def _halves(trajectory: Trajectory) -> Iterator[Trajectory]:
    """Two segments that share out its response tokens, each with its prompt; or itself."""
    places = np.flatnonzero(trajectory.response_mask)
    if len(places) < 2:
        yield trajectory
        return
    prompt = np.flatnonzero(~trajectory.response_mask)
    for part in np.array_split(places, 2):
        kept = np.concatenate([prompt, part])
        names = ("token_ids", "response_mask", "behavior_logprobs", "policy_versions")
        yield structs.replace(trajectory, **{n: getattr(trajectory, n)[kept] for n in names})


def poisoned(
    groups: Sequence[TrajectoryGroup], *which: tuple[int, int]
) -> tuple[TrajectoryGroup, ...]:
    """With POISON in the prompts of these trajectories of these groups, by their places."""

    def changed(t: Trajectory) -> Trajectory:
        return structs.replace(t, token_ids=np.where(np.arange(t.num_tokens), t.token_ids, POISON))

    return tuple(
        structs.replace(
            group,
            trajectories=tuple(
                changed(t) if (g, m) in which else t for m, t in enumerate(group.trajectories)
            ),
        )
        for g, group in enumerate(groups)
    )


def poison(trainer: Trainer, value: float = torch.nan) -> None:
    """Make the embedding of POISON this value; all ranks call it together."""
    models = [trainer.policy.model, *([trainer.critic.network.model] if trainer.critic else [])]
    for model in models:
        weight = model.get_input_embeddings().weight
        whole = full(weight).clone()
        whole[POISON] = value
        assign(weight, whole)


def make_batch(seed: int = 0, num_groups: int = 5, group_size: int = 4) -> TrainingBatch:
    return TrainingBatch.of(make_groups(seed, num_groups, group_size), policy_version=4)


def make_trainer(
    config: RunConfig, mesh: Mesh | None = None, ranks: Ranks | None = None
) -> Trainer:
    """With the models that the algorithm needs, distributed over a mesh if there is one; the
    reference has a larger head. Under `router_replay` they are mixtures of experts."""
    torch.manual_seed(0)
    temperature = config.generator.temperature
    router_replay = config.algorithm.router_replay

    def make() -> Policy:
        if router_replay == "off":
            return make_policy(temperature)
        return Policy(Network(make_model("Qwen3-MoE"), temperature=temperature))

    policy = make()
    reference = make() if config.algorithm.needs_reference else None
    if reference is not None:
        with torch.no_grad():
            reference.model.get_output_embeddings().weight.mul_(1.5)
    values = make_network(has_values=True) if config.algorithm.needs_values else None
    for network in (reference and reference.network, values):
        if network is not None:
            distribute(network, mesh, config.learner)
    distribute(policy.network, mesh, config.learner, router_replay=router_replay)
    critic = None if values is None else Critic(config, values)
    teachers = make_teachers(config, mesh, ranks)
    return Trainer(config, policy, reference, critic, ranks, teachers)


def make_teachers(
    config: RunConfig, mesh: Mesh | None = None, ranks: Ranks | None = None
) -> Teachers | None:
    """Of `algorithm.distillation`; each has another head than the policy."""
    settings = config.algorithm.distillation
    if settings is None:
        return None
    policies = {}
    for place, teacher in enumerate(settings.in_learner):
        policy = make_policy(config.generator.temperature)
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(2.0 + place)
        distribute(policy.network, mesh, config.learner, is_reference=True)
        policies[teacher.name] = policy
    return Teachers(settings, policies, config.learner.max_tokens_per_micro_batch, ranks or Ranks())
