"""An evaluation of more prompts than the engine has room for scores all that can be scored."""

from pathlib import Path

import pytest

from actors.episodes.mixed_runner import FirstGroups
from actors.evaluation import greedy_groups_of, scores_of
from actors.make_model import make_tokenizer
from actors.validation import length_metrics
from streamrl.config import RunConfig
from streamrl.errors import RolloutError
from tests.training import make_groups, segmented
from tests.unit.test_generator import FakeEngine


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    make_tokenizer("0123456789+=").save_pretrained(tmp_path)
    return RunConfig.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "data": {"source": "addition", "num_eval_prompts": 10},
            "generator": {"max_num_seqs": 1},
        }
    )


async def test_prompts_that_wait_for_the_engine_have_their_whole_deadline(config):
    """It counts from the begin of an episode: those that have begun are few."""
    engine = FakeEngine()
    done: list[tuple[int, int]] = []
    greedy = await greedy_groups_of(config, engine, lambda *counts: done.append(counts))
    assert done == [(number, 10) for number in range(1, 11)]
    assert [group.prompt_index for group in greedy.groups] == list(range(10))
    assert engine.most_running == 2


async def test_prompts_that_fail_are_left_out_and_counted(config, caplog):
    engine = FakeEngine()
    engine.failure, engine.num_failures = RolloutError("no luck"), 3
    greedy = await greedy_groups_of(config, engine)
    scores = scores_of("model", greedy)
    assert (scores["num_prompts"], scores["num_failed"], "num_too_long" in scores) == (7, 3, False)
    assert "3 of 10 prompts failed, the first: no luck" in caplog.text


def test_a_response_is_as_long_as_all_contexts_of_its_episode():
    groups = make_groups(num_groups=6, group_size=1)
    parts = tuple(map(segmented, groups))
    assert len(parts[0].trajectories) == 2
    assert scores_of("model", FirstGroups(parts)) == scores_of("model", FirstGroups(groups))
    assert length_metrics(parts) == length_metrics(groups)


async def test_if_every_prompt_fails_the_evaluation_does(config):
    engine = FakeEngine()
    engine.failure = RolloutError("no luck")
    with pytest.raises(RolloutError, match=r"^no luck$"):
        await greedy_groups_of(config, engine)
