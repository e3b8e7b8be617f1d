"""Trajectories of a rollout alone."""

from actors.episode_record import Rollout
from actors.episodes.group import assembled
from streamrl.interfaces import Score
from streamrl.types import Trajectory


def trajectories_of(rollout: Rollout, reward: float = 0.0) -> tuple[Trajectory, ...]:
    scored = [(rollout, Score(reward))]
    return assembled(scored, group_id="g", prompt_index=0, environment="test").trajectories
