"""A group whose episodes have several segments goes through every buffer as it was sampled."""

import dataclasses

import numpy as np
import pytest

from actors.episodes.group import unbuffered_lease
from streamrl.interfaces import Transition
from streamrl.types import Completion, TrajectoryGroup
from tests.contract.test_buffers import connect, lease_ttl_s  # noqa: F401
from tests.records import lease_one
from tests.unit.episodes.environments import SubAgent, Summarizing
from tests.unit.test_generator import Run


class PartlyTrained(Summarizing):
    """Its first completion is not trained."""

    async def step(self, completion: Completion) -> Transition:
        transition = await super().step(completion)
        return dataclasses.replace(transition, in_loss=self.turn > 1, reward=0.5)


async def sampled(environment: type, prompt_index: int, lease_id: str) -> TrajectoryGroup:
    runner = dataclasses.replace(Run().runner, make_environment=environment)
    return await runner.run(unbuffered_lease(lease_id, prompt_index))


@pytest.mark.parametrize("environment", [PartlyTrained, SubAgent])
async def test_segments_reach_the_learner_as_they_were_sampled(connect, environment):  # noqa: F811
    generator, learner = connect(), connect()
    await learner.attach(0, None)
    put: list[TrajectoryGroup] = []
    for lease_id in ("a", "b"):
        lease = await lease_one(generator, lease_id, "g", 1.0)
        put.append(await sampled(environment, lease.prompt_index, lease_id))
        await generator.put(lease_id, put[-1])
    loan = await learner.take(2, 0, 5.0, with_payloads=True)
    groups = loan.groups or await learner.fetch([h.prompt_index for h in loan.headers])
    assert len(groups) == 2
    for group, header, expected in zip(groups, loan.headers, put, strict=True):
        num_segments = len(expected.trajectories) // 2
        assert num_segments > 1
        assert group.episode_indices == (0,) * num_segments + (1,) * num_segments
        assert header.episode_indices == group.episode_indices
        for one, other in zip(group.trajectories, expected.trajectories, strict=True):
            assert one.turns == other.turns
            assert one.metrics == other.metrics
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            mask = other.response_mask if other.loss_mask is None else other.loss_mask
            kept = one.response_mask if one.loss_mask is None else one.loss_mask
            np.testing.assert_array_equal(kept, mask)
    if environment is PartlyTrained:
        first, *_ = groups[0].trajectories
        assert first.loss_mask.sum() < first.response_mask.sum()
        assert [turn.reward for turn in first.turns] == [0.5, 0.5]
