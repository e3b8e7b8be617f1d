"""Token exactness: what is recorded is what the engine read and sampled, and what the learner
scores."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch

from actors.engines.hf.engine import HfEngine
from actors.episodes.group import GroupRunner, unbuffered_lease
from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from learners.batch.training_batch import TrainingBatch
from streamrl.config.data import DataSettings
from streamrl.interfaces import EnvironmentContext, Observation
from streamrl.types import Completion, SamplingParams, Trajectory, TrajectoryGroup
from tests.tiny_model import EOS, make_llama
from tests.training import make_policy
from tests.unit.episodes.environments import NotingEngine, SubAgent, Summarizing, Turns
from tests.unit.test_generator import LengthReward, Prompts

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
CHAT = "{% for m in messages %}<s>{{ m['role'][0] }}{{ m['content'] }}</s>{% endfor %}<s>a"
MAX_MODEL_LEN = 256


class Chatting(Turns):
    """Answers with messages."""

    num_turns = 4

    def answer(self, completion: Completion) -> Observation:
        return Observation(messages=({"role": "user", "content": f"again{self.turn}"},))


class ChattingInContexts(Chatting):
    """Every second answer opens a context with messages."""

    def answer(self, completion: Completion) -> Observation:
        return dataclasses.replace(super().answer(completion), is_new_context=self.turn % 2 == 0)


async def sampled(
    tmp_path, make_environment: type[Turns], max_new_tokens: int = 7
) -> tuple[TrajectoryGroup, NotingEngine]:
    (tmp_path / "chat.jinja").write_text(CHAT)
    data = DataSettings.model_validate(
        {"source": "addition", "chat_template": tmp_path / "chat.jinja"}
    )
    engine = HfEngine(
        make_llama(), eos_token_ids=frozenset([EOS]), max_num_seqs=3, max_model_len=MAX_MODEL_LEN
    )
    noting = NotingEngine(engine)
    runner = GroupRunner(
        engine=noting,
        prompts=Prompts(),
        renderer=ChatRenderer(make_tokenizer(LETTERS), data),
        make_environment=make_environment,
        environment="test",
        reward=LengthReward(),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=4,
        max_model_len=MAX_MODEL_LEN,
    )
    try:
        return await runner.run(unbuffered_lease("test", 3)), noting
    finally:
        await engine.close()


def requests_of(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What the record says that the engine read and sampled, turn by turn."""
    ids, end, requests = trajectory.token_ids.tolist(), 0, []
    for turn in trajectory.turns:
        start = end + turn.num_observation_tokens
        end = start + turn.num_completion_tokens
        requests.append((tuple(ids[:start]), tuple(ids[start:end])))
        assert trajectory.response_mask[start:end].all()
    assert end == len(ids)
    return requests


def in_order(requests: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]):
    return sorted(requests)


@pytest.mark.parametrize(
    ("environment", "num_segments"),
    [(Turns, 1), (Chatting, 1), (Summarizing, 3), (SubAgent, 2), (ChattingInContexts, 2)],
)
async def test_the_record_is_what_the_engine_saw_and_what_the_learner_scores(
    tmp_path, environment, num_segments
):
    group, engine = await sampled(tmp_path, environment)
    recorded = [request for t in group.trajectories for request in requests_of(t)]
    seen = [(read, tuple(completion.token_ids.tolist())) for read, completion in engine.seen]
    assert in_order(recorded) == in_order(seen)
    assert len(group.trajectories) == 4 * num_segments
    assert (group.episode_indices == ()) == (num_segments == 1)
    # An id that was sampled has the log-probability that the engine gave it, and the learner.
    logprobs = {(read, tuple(c.token_ids.tolist())): c.logprobs.tolist() for read, c in engine.seen}
    for trajectory in group.trajectories:
        by_turn = [logprobs[request] for request in requests_of(trajectory)]
        kept = trajectory.behavior_logprobs[trajectory.response_mask]
        assert kept.tolist() == [value for turn in by_turn for value in turn]
    batch = TrainingBatch.of([group], policy_version=0)
    assert not batch.staleness.any()
    micro_batches = batch.pack(10_000, torch.device("cpu"))
    scored = make_policy().batch_logprobs(micro_batches, batch.sequences.num_tokens)
    np.testing.assert_allclose(scored, batch.behavior_logprobs, atol=1e-4)


async def test_completions_that_are_cut_are_followed_by_the_end_of_their_turn(tmp_path):
    group, _ = await sampled(tmp_path, Chatting, max_new_tokens=2)
    end, opening = 2, [1, 2]
    for trajectory in group.trajectories:
        requests = requests_of(trajectory)
        for (read, completion), (later, _) in pairwise(requests):
            between = later[len(read) + len(completion) :]
            assert later[: len(read) + len(completion)] == (*read, *completion)
            assert (completion[-1] == end) != (between[0] == end)
            assert between[-2:-1] == tuple(opening[:1])


class Telling(Chatting):
    """Gives what it saw to the test."""

    contexts: ClassVar[list[EnvironmentContext]] = []

    async def start(self, context: EnvironmentContext) -> Observation:
        self.contexts.append(context)
        return await super().start(context)


async def test_siblings_have_one_seed_and_a_place_of_their_own(tmp_path):
    Telling.contexts.clear()
    await sampled(tmp_path, Telling)
    assert {context.episode_index for context in Telling.contexts} == {0, 1, 2, 3}
    (seed,) = {context.seed for context in Telling.contexts}
    first = [*Telling.contexts]
    Telling.contexts.clear()
    await sampled(tmp_path, Telling)
    assert {context.seed for context in Telling.contexts} == {seed}
    assert first[0].prompt_messages == ({"role": "user", "content": "xxxx"},)
