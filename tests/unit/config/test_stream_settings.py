"""A run goes on with its own prompts: every setting that moves one is compared, and no other."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.prompts import open_prompts, shares
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.environments import first_difference
from tests.training import make_config

MOVING = {
    "run.seed": {"run": {"seed": 1}},
    "data.source": {"data": {"source": "b.jsonl"}},
    "data.shuffle": {"data": {"shuffle": False}},
    "data.curriculum": {"data": {"curriculum": {"order": "descending"}}},
    "data.source.0.weight": {"data": {"source": [{"path": "a.jsonl", "weight": 1}]}},
    "environments": {"environments": [{"name": n, "environment": "single_turn"} for n in "xyz"]},
}
OTHERS = {
    "as a list": {"data": {"source": ["a.jsonl"]}},
    "the only environment": {"environments": [{"name": "x", "environment": "single_turn"}]},
    "batch": {"learner": {"groups_per_step": 4}},
    "truncation": {"data": {"truncation": "left", "max_prompt_length": 9}},
    "reward": {"data": {"reward": "math", "num_eval_prompts": 3}},
}
OF_TWO = {
    "learner.groups_per_step": ({}, {}, {"groups_per_step": 4}),
    "environments.0.weight": ({"weight": 3}, {}, {}),
    "environments.1.max_trajectories / group_size": ({}, {"max_trajectories": 16}, {}),
    "environments.0.data.source": ({"data": {"source": "b.jsonl"}}, {}, {}),
    "environments.0.data.source_kwargs": (
        {"data": {"source": "copy", "source_kwargs": {"max_length": 9}}},
        {},
        {},
    ),
    "environments.1.data.shuffle": ({}, {"data": {"shuffle": False}}, {}),
    "": ({"group_size": 2}, {"max_trajectories": 800}, {}),
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        rows = ({"prompt": f"{name}{i}", "answer": "", "difficulty": i} for i in range(20))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(**sections: Any) -> RunConfig:
    data = {"source": "a.jsonl", "max_prompt_length": 10, **sections.pop("data", {})}
    return make_config(data=data, **sections)


def of_two(first: Any, second: Any, learner: Any) -> RunConfig:
    entry = {"environment": "single_turn"}
    first = {"data": {"source": "copy"}, **first}
    return make(
        environments=[{"name": "x", **entry, **first}, {"name": "y", **entry, **second}],
        learner={"groups_per_step": 8, **learner},
    )


def prompts(config: RunConfig) -> list[Any]:
    mixture = shares(config)
    sources = [open_prompts(entry.data, config.run.seed) for entry in config.entries]
    places = map(mixture.place, range(60))
    return [sources[entry][own_index].content for entry, own_index in places]


def difference(then: RunConfig, now: RunConfig) -> str:
    """The name of the setting, once `then` was written into a run's folder."""
    Path("config.yaml").write_text(to_yaml(then))
    found = first_difference(load_config("config.yaml", environment={}).config, now)
    return "" if found is None else found[0]


@pytest.mark.parametrize("name", MOVING)
def test_a_setting_that_moves_prompts_is_named(name):
    now = make(**MOVING[name])
    assert prompts(make()) != prompts(now)
    assert difference(make(), now) == name
    assert difference(now, now) == ""


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_that_moves_no_prompts_is_not_named(name):
    now = make(**OTHERS[name])
    assert prompts(make()) == prompts(now)
    assert difference(make(), now) == ""


@pytest.mark.parametrize("name", OF_TWO)
def test_the_settings_of_several_environments_are_compared(name):
    then, now = of_two({}, {}, {}), of_two(*OF_TWO[name])
    assert (prompts(then) == prompts(now)) is (name == "")
    assert difference(then, now) == name


def test_what_measures_a_prompt_is_compared_where_long_ones_are_filtered():
    then = make(data={"truncation": "filter"})
    assert difference(make(), then) == "data.truncation"
    for name, value in (("max_prompt_length", 9), ("prompt_key", "answer")):
        assert difference(then, make(data={"truncation": "filter", name: value})) == f"data.{name}"
        assert difference(make(), make(data={name: value})) == ""
    task = {"source": "copy", "truncation": "filter"}
    assert difference(make(data=task), make(data={**task, "max_prompt_length": 9})) == ""
    assert difference(make(data=task), make(data={**task, "shuffle": False})) == ""
