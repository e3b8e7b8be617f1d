"""What episodes record reaches the metrics of a step, as means by environment."""

import dataclasses
import json

import pytest
from msgspec import structs

from actors.episodes.group import unbuffered_lease
from learners.batch.training_batch import (
    TrainingBatch,
    add_episode_sums,
    episode_means,
    episode_sums,
)
from learners.trainer import Trainer
from streamrl.interfaces import Transition
from streamrl.tracking.jsonl import JsonlTracker
from streamrl.types import Completion, TrajectoryGroup
from tests.training import make_config, make_groups, make_policy, with_metrics
from tests.unit.episodes.environments import Summarizing, Turns
from tests.unit.test_generator import Run


def group(environment: str, *num_turns: float, indices: tuple[int, ...] = ()) -> TrajectoryGroup:
    (made,) = make_groups(num_groups=1, group_size=len(num_turns))
    trajectories = tuple(
        structs.replace(t, metrics={"num_turns": n})
        for t, n in zip(made.trajectories, num_turns, strict=True)
    )
    return structs.replace(
        made, environment=environment, trajectories=trajectories, episode_indices=indices
    )


def test_the_means_are_those_of_each_environment():
    groups = [group("sokoban", 1, 3), group("folder/own.py:Maze", 8), group("sokoban", 5)]
    assert episode_means(episode_sums(groups)) == {
        "episode/own.py:Maze/num_turns": 8,
        "episode/sokoban/num_turns": 3,
    }


def test_an_episode_counts_once_whatever_the_number_of_its_segments():
    segments = group("a", 6, 6, 6, 2, indices=(0, 0, 0, 1))
    assert episode_means(episode_sums([segments])) == {"episode/a/num_turns": 4}


def test_parts_and_ranks_add_up():
    groups = [group("a", 1, 2), group("b", 3), group("a", 9)]
    apart = add_episode_sums(episode_sums([one]) for one in groups)
    assert (
        episode_means(apart)
        == episode_means(episode_sums(groups))
        == {
            "episode/a/num_turns": 4,
            "episode/b/num_turns": 3,
        }
    )


class Playing(Turns):
    """Two tool calls a turn; the last turn breaks its form."""

    async def step(self, completion: Completion) -> Transition:
        transition = await super().step(completion)
        return dataclasses.replace(
            transition, num_tool_calls=2, is_valid=not transition.done, metrics={"level": self.turn}
        )


@pytest.mark.parametrize("environment", [Playing, Summarizing])
async def test_what_an_episode_records_stands_in_metrics_jsonl(tmp_path, environment):
    runner = dataclasses.replace(
        Run().runner, make_environment=environment, environment=environment.__name__
    )
    sampled = await runner.run(unbuffered_lease("test", 0))
    trainer = Trainer(make_config(), make_policy())
    metrics = trainer.step(TrainingBatch.of([sampled], policy_version=0))
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", first_step=1)
    tracker.log(metrics, 1)
    tracker.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    prefix = f"episode/{environment.__name__}"
    if environment is Playing:
        assert line[f"{prefix}/num_turns"] == 3
        assert line[f"{prefix}/num_tool_calls"] == 6
        assert line[f"{prefix}/num_invalid_turns"] == 1
        assert line[f"{prefix}/level"] == 3
        assert line[f"{prefix}/num_segments"] == 1
    else:
        assert line[f"{prefix}/num_turns"] == 5
        assert line[f"{prefix}/num_segments"] == 3
    assert line[f"{prefix}/environment_wait_s"] >= 0


def test_episodes_without_metrics_leave_none():
    (plain,) = make_groups(num_groups=1)
    assert episode_sums([plain]) == {}
    assert "episode/test/level" in episode_sums([with_metrics(plain, level=2.0)])
