"""Groups of several environments: who plays which, how many siblings, and what the learner gets."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from actors.episodes.group import unbuffered_lease
from actors.episodes.mixed_runner import MixedRunner, make_runner
from actors.make_model import make_tokenizer
from actors.prompts import open_held_out_stream, open_stream
from actors.rendering.renderer import ChatRenderer
from learners.batch.training_batch import TrainingBatch
from learners.objective.credit import CreditAssigner
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, FinishReason, SamplingParams
from tests.unit.test_generator import FakeEngine

LAKE = {
    "name": "lake",
    "environment": "frozen_lake",
    "kwargs": {"actions": list("LDRU"), "separator": "", "instructions": "", "max_moves": 3},
    "group_size": 3,
}
WORDS = {
    "name": "words",
    "environment": "single_turn",
    "group_size": 2,
    "weight": 2,
    "reward": "exact_match",
    "data": {"source": "copy"},
}
REWARD = {"format_penalty": 0.5, "agentic": {"grouping": "inductive", "method": "mean"}}


class SpellingEngine(FakeEngine):
    """Answers with one character after the other of a text, each a turn."""

    def __init__(self, renderer: ChatRenderer, text: str) -> None:
        super().__init__()
        self._tokens = renderer.encode_text(text)
        self._number = 0

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        token = self._tokens[self._number % len(self._tokens)]
        self._number += 1
        return Completion(
            token_ids=np.array([token], np.int32),
            logprobs=np.zeros(1, np.float32),
            policy_versions=np.zeros(1, np.int32),
            finish_reason=FinishReason.STOP,
        )


def config_of(*environments: dict, **sections: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"source": "environment", "reward": "environment", "num_eval_prompts": 5},
            "environments": environments,
            "learner": {"groups_per_step": 6},
            **sections,
        }
    )


def runner_of(config: RunConfig) -> MixedRunner:
    renderer = renderer_of(config)
    engine = SpellingEngine(renderer, "DYR")
    return make_runner(config, engine, renderer, open_stream(config, renderer))


def renderer_of(config: RunConfig) -> ChatRenderer:
    return ChatRenderer(make_tokenizer("PXOG_!\nLDRUcY0123456789="), config.data)


async def groups_of(config: RunConfig, count: int):
    runner = runner_of(config)
    leases = [unbuffered_lease("test", index) for index in range(count)]
    return [await runner.of(lease.prompt_index).run(lease) for lease in leases]


async def test_each_group_is_played_scored_and_named_by_its_entry():
    groups = await groups_of(config_of(LAKE, WORDS), 6)
    assert Counter(group.environment for group in groups) == {"lake": 2, "words": 4}
    for group in groups:
        is_lake = group.environment == "lake"
        assert len(group.trajectories) == (3 if is_lake else 2)
        assert (max(len(t.turns) for t in group.trajectories) > 1) == is_lake


async def test_the_learner_subtracts_invalid_turns_and_compares_within_an_environment():
    config = config_of(LAKE, WORDS, algorithm={"advantage": "reinforce", "reward": REWARD})
    groups = await groups_of(config, 6)
    batch = TrainingBatch.of(groups, policy_version=1)
    trajectories = [t for group in groups for t in group.trajectories]
    counted = torch.tensor([t.metrics.get("num_invalid_turns", 0.0) for t in trajectories])
    assert counted.sum() > 0
    assert batch.num_invalid_turns.tolist() == counted.tolist()
    names = [group.environment for group in groups for _ in group.trajectories]
    assert len(set(zip(names, batch.environment_indices.tolist(), strict=True))) == 2
    raw = batch.rewards - 0.5 * counted
    expected = torch.stack(
        [raw[i] - raw[[other == name for other in names]].mean() for i, name in enumerate(names)]
    )
    advantages = CreditAssigner(config.algorithm).assign(batch).advantages
    assert torch.allclose(advantages, batch.sequences.expand(expected))


def test_an_engine_has_room_by_the_siblings_of_what_it_holds():
    runner = runner_of(config_of(LAKE, WORDS))
    sizes = [runner.of(index).num_episodes for index in range(6)]
    assert Counter(sizes) == {3: 2, 2: 4}


def test_held_out_prompts_are_those_of_each_entry_and_of_no_training():
    config = config_of(LAKE, WORDS)
    held_out, training = open_held_out_stream(config), open_stream(config, renderer_of(config))
    prompts = [held_out[i] for i in range(len(held_out))]
    assert Counter(prompt.environment for prompt in prompts) == {"lake": 5, "words": 5}
    trained = [training[i] for i in range(300)]
    seeds = {prompt.row.get("seed") for prompt in trained} - {None}
    assert seeds.isdisjoint(prompt.row.get("seed") for prompt in prompts[:5])
    assert {p.content for p in trained} & {p.content for p in prompts} == {""}
    with pytest.raises(IndexError, match="10 prompts, and not one numbered 10"):
        held_out[10]


def test_a_weight_too_small_to_play_is_refused():
    config = config_of({**LAKE, "weight": 1e-9}, WORDS)
    with pytest.raises(ConfigError, match=r"environments\.0\.weight: was 1e-09, too little"):
        open_stream(config, renderer_of(config))
