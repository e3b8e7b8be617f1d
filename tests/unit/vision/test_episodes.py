"""Images of several turns: what the environment shows reaches the engine and the record."""

import numpy as np
import pytest

from actors.episode_record import EpisodeRecord
from actors.episodes.group import GroupRunner, unbuffered_lease
from streamrl.interfaces import EnvironmentContext, Observation, Prompt, Transition
from streamrl.types import Completion, FinishReason, Media, SamplingParams
from tests.tiny_vision import END, IMAGE, START, image, png
from tests.unit.vision.test_prompts import renderer

FIRST, SECOND = image(16, 16), image(40, 24, 1)


def completion(*token_ids: int) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.full(len(token_ids), -1.0, np.float32),
        policy_versions=np.zeros(len(token_ids), np.int32),
        finish_reason=FinishReason.STOP,
    )


class Recorded:
    """An engine that answers with a placeholder token, which is text to whoever reads it."""

    policy_version = 0

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[Media, ...]]] = []

    async def generate(self, prompt_token_ids, sampling, handle=None, media=()):
        self.calls.append((tuple(prompt_token_ids), tuple(media)))
        return completion(IMAGE)


class TwoPictures:
    """Shows a second image before the second turn."""

    async def start(self, context: EnvironmentContext) -> Observation:
        self.turns = 0
        return Observation(token_ids=context.prompt_token_ids)

    async def step(self, completion: Completion) -> Transition:
        self.turns += 1
        part = {"type": "image", "image": SECOND}
        message = {"role": "user", "content": [part]}
        return Transition(done=self.turns == 2, observation=Observation(messages=(message,)))

    async def close(self) -> None: ...


class Ones:
    async def score(self, episodes):
        return [1.0] * len(episodes)


async def test_a_group_holds_the_images_of_its_prompt_and_of_its_turns_once():
    part = {"type": "image", "image": png(16, 16)}
    prompt = Prompt(({"role": "user", "content": [part]},), "x")
    engine = Recorded()
    runner = GroupRunner(
        engine=engine,
        prompts=[prompt],
        renderer=renderer(),
        make_environment=TwoPictures,
        environment="e",
        reward=Ones(),
        sampling=SamplingParams(max_new_tokens=1),
        group_size=3,
        max_model_len=64,
    )
    group = await runner.run(unbuffered_lease("test", 0))
    start, shown = (START, IMAGE, END), (START, *[IMAGE] * 4, END)
    assert set(engine.calls) == {
        (start, (FIRST,)),
        ((*start, IMAGE, *shown), (FIRST, SECOND)),
    }
    assert group.media == (FIRST, SECOND)
    assert [t.media for t in group.trajectories] == [(FIRST.id, SECOND.id)] * 3
    assert tuple(group.trajectories[0].token_ids) == (*start, IMAGE, *shown, IMAGE)


@pytest.mark.parametrize(("other", "num_segments"), [(FIRST, 1), (image(16, 16, 7), 2)])
def test_equal_tokens_of_another_image_are_another_segment(other, num_segments):
    record = EpisodeRecord()
    record.add((START, IMAGE, END), completion(5), (FIRST,))
    record.add((START, IMAGE, END, 5, 6), completion(7), (other,))
    assert len(record.segments) == num_segments
