"""What a teacher by url must answer, for the tests of real engines: their servers have the model of
`tests.engines.make_model`."""

import asyncio

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

from actors.rendering.renderer import ChatRenderer
from actors.rewards.calls.limits import FinalError
from actors.rewards.remote.http import Service, ServiceSettings
from actors.rewards.remote.teachers import RemoteTeachers
from streamrl.config.algorithm.distillation import DistillationSettings
from streamrl.config.data import DataSettings
from streamrl.errors import RolloutError
from streamrl.types import Trajectory, TrajectoryGroup
from tests.engines import make_model
from tests.training import make_groups

GROUP = structs.replace(make_groups(num_groups=1, group_size=3)[0], teacher="", teacher_prompt=None)
TOP_K = 4
START_S = 400.0


def wait_until_served(url: str) -> None:
    """At most START_S."""
    asyncio.run(_until_served(url))


async def _until_served(url: str) -> None:
    service = Service(ServiceSettings(url=url))
    async with asyncio.timeout(START_S):
        while True:
            try:
                await service.post("/detokenize", {"tokens": [3]}, dict)
            except FinalError:
                return  # It has no tokenizer.
            except RolloutError:
                await asyncio.sleep(1.0)
            else:
                return


def scored(tokenizer: object, top_k: int = 0, **teacher: object) -> TrajectoryGroup:
    settings = DistillationSettings.model_validate(
        {"teachers": [teacher], "retries": 0, "top_k": top_k}
    )
    renderer = ChatRenderer(tokenizer, DataSettings(source="addition", max_prompt_length=10))
    return asyncio.run(RemoteTeachers(settings, renderer).score(GROUP))


def require_logprobs_of_model(group: TrajectoryGroup) -> None:
    for t in group.trajectories:
        rows = logprobs_before(t)
        own = np.array([0.0, *(row[i] for row, i in zip(rows, t.token_ids[1:], strict=True))])
        assert t.teacher_logprobs is not None
        np.testing.assert_allclose(t.teacher_logprobs, own * t.response_mask, atol=2e-4)


def require_likeliest_of_model(group: TrajectoryGroup) -> None:
    """With TOP_K."""
    for t in group.trajectories:
        rows, top = logprobs_before(t), t.teacher_top_logprobs
        assert top is not None
        np.testing.assert_array_equal(top.counts, TOP_K * t.response_mask)
        ids = top.token_ids.reshape(-1, TOP_K)
        found = top.logprobs.reshape(-1, TOP_K)
        places = np.flatnonzero(t.response_mask)
        for place, candidates, values in zip(places, ids, found, strict=True):
            row = rows[place - 1]
            np.testing.assert_allclose(values, row[candidates], rtol=2**-11, atol=2e-4)
            np.testing.assert_allclose(values, np.sort(row)[::-1][:TOP_K], rtol=2**-11, atol=2e-4)


def logprobs_before(t: Trajectory) -> NDArray[np.float32]:
    """[T - 1, vocabulary]: of the token behind each."""
    with torch.no_grad():
        logits = make_model()(input_ids=torch.from_numpy(t.token_ids).long()[None]).logits[0]
    logprobs: NDArray[np.float32] = logits.log_softmax(-1).numpy()[:-1]
    return logprobs
