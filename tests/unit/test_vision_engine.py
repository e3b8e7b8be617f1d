"""Images in the HF engine: its log-probabilities are the learner's, whatever is beside them."""

import asyncio

import numpy as np
import pytest
import torch

from actors.engines.hf.engine import HfEngine
from learners.batch.training_batch import TrainingBatch
from learners.policy.network import Network
from streamrl.errors import RolloutError
from streamrl.types import Completion, Media, SamplingParams, Trajectory, TrajectoryGroup
from streamrl.types.media import distinct
from streamrl.vision.places import Placeholders
from streamrl.vision.tower import VisionTower
from tests.tiny_model import make_llama
from tests.tiny_vision import END, IMAGE, START, image, make_qwen, reader

PLACEHOLDERS = Placeholders.of(make_qwen().config)
READER = reader()
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)
ROUNDING = 1e-4
PROMPTS = (
    ((5, 6, 7), ()),
    ((5, START, IMAGE, END, 6), (image(40, 24),)),
    ((START, IMAGE, END, 7, START, IMAGE, END, 8, 9), (image(16, 90, 1), image(64, 64, 2))),
    ((5, START, IMAGE, END, 6), (image(16, 16, 3),)),
)


def expanded(prompt: tuple[tuple[int, ...], tuple[Media, ...]]) -> tuple[int, ...]:
    token_ids, media = prompt
    return PLACEHOLDERS.expand(token_ids, [READER.size(m) for m in media], "a test")


def engine(**overrides: int) -> HfEngine:
    settings = {"max_num_seqs": 3, "max_model_len": 200, **overrides}
    return HfEngine(make_qwen(), eos_token_ids=frozenset(), reader=READER, **settings)


def trajectory(
    token_ids: tuple[int, ...], media: tuple[Media, ...], completion: Completion
) -> Trajectory:
    num_prompt = len(token_ids)
    is_response = np.arange(num_prompt + len(completion.token_ids)) >= num_prompt
    return Trajectory(
        token_ids=np.concatenate([np.array(token_ids, np.int32), completion.token_ids]),
        response_mask=is_response,
        behavior_logprobs=np.pad(completion.logprobs, (num_prompt, 0)),
        policy_versions=np.where(is_response, 0, -1).astype(np.int32),
        reward=0.0,
        finish_reason=completion.finish_reason,
        media=tuple(m.id for m in media),
    )


async def test_log_probabilities_of_the_engine_are_those_of_the_learner():
    own = engine()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(8)]
    completions = await asyncio.gather(
        *(own.generate(expanded(prompt), SAMPLING, media=prompt[1]) for prompt in prompts)
    )
    await own.close()
    trajectories = tuple(
        trajectory(expanded(prompt), prompt[1], completion)
        for prompt, completion in zip(prompts, completions, strict=True)
    )
    group = TrajectoryGroup(
        group_id="a",
        prompt_index=0,
        environment="e",
        trajectories=trajectories,
        media=distinct(m for _, media in prompts for m in media),
    )
    assert len(group.media) == 4
    batch = TrainingBatch.of([group], 0)
    model = make_qwen()
    network = Network(model, temperature=1.0, tower=VisionTower(model, READER))
    for micro_batch in batch.pack(120, torch.device("cpu")):
        with torch.no_grad():
            computed = network(micro_batch).logprobs
        gap = (computed - batch.behavior_logprobs[micro_batch.responses]).abs().max()
        assert float(gap) < ROUNDING


async def test_a_request_without_a_place_for_its_image_fails_alone():
    own = engine()
    whole = expanded(PROMPTS[1])
    good = asyncio.create_task(own.generate(whole, SAMPLING, media=PROMPTS[1][1]))
    with pytest.raises(RolloutError, match="the token ids have no place for 8 tokens of an image"):
        await own.generate(whole, SAMPLING, media=(image(64, 32, 5),))
    with pytest.raises(RolloutError, match="is no image; PNG, JPEG, WEBP, BMP are read"):
        await own.generate(whole, SAMPLING, media=(Media.image(b"no image"),))
    assert len((await good).token_ids) == 12
    await own.close()


async def test_a_model_that_sees_none_refuses_images():
    own = HfEngine(make_llama(0), eos_token_ids=frozenset(), max_num_seqs=1, max_model_len=32)
    with pytest.raises(RolloutError, match=r"the model of model\.path sees none"):
        await own.generate((5,), SAMPLING, media=(image(16, 16),))
    await own.close()
