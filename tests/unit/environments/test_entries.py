"""`environments`: what is refused, and what an entry inherits."""

import pytest

from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.errors import ConfigError

BASE = "model: {path: m}\ndata: {source: copy, reward: environment, max_prompt_length: 9}\n"


@pytest.fixture
def load(tmp_path):
    def loaded(text: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(BASE + text)
        return load_config(path, environment={}).config

    return loaded


def test_the_short_form_is_one_entry_of_that_name(load):
    config = load(
        "generator: {environment: frozen_lake, environment_kwargs: {size: 7}, group_size: 3}"
    )
    (entry,) = config.entries
    assert (entry.name, entry.kwargs, entry.group_size) == ("frozen_lake", {"size": 7}, 3)
    assert entry.data == config.data


def test_an_entry_takes_what_it_leaves_out_from_the_run(load):
    config = load(
        "generator: {group_size: 4}\n"
        "environments:\n"
        "- {name: a, environment: frozen_lake}\n"
        "- {name: b, environment: single_turn, group_size: 2, reward: regex,\n"
        "   reward_kwargs: {pattern: x}, data: {source: sort, source_kwargs: {max_length: 5}}}\n"
    )
    a, b = config.entries
    assert (a.group_size, a.data) == (4, config.data)
    assert (b.group_size, b.data.source, b.data.reward) == (2, "sort", "regex")
    assert (b.data.max_prompt_length, b.data.reward_kwargs) == (9, {"pattern": "x"})
    assert (config.max_group_size, config.mean_group_size) == (4, 3.0)
    assert config.group_bytes(10) == 4 * 10 * 6


def test_what_was_read_is_written_and_read_again(load, tmp_path):
    config = load("environments: [{name: a, environment: frozen_lake, data: {source: sort}}]")
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml", environment={}).config == config


REFUSED = [
    ("[{name: a, environment: b, weigth: 2}]", r"environments\.0\.weigth: .*mean 'weight'"),
    ("[{name: a, environment: b, weight: 0}]", r"environments\.0\.weight: was 0"),
    ("[{environment: b}]", r"environments\.0\.name: is required"),
    ("[{name: a, environment: b, data: {sorce: c}}]", r"environments\.0\.data\.sorce: .*'source'"),
    ("[{name: a, environment: b, data: {shuffle: 3}}]", r"environments\.0\.data\.shuffle: was 3"),
    (
        "[{name: a, environment: b, data: {chat_template: none}}]",
        r"environments\.0\.data\.chat_template: is one for the whole run: set data\.chat_template",
    ),
    (
        "[{name: a, environment: b, data: {reward: regex}}]",
        r"environments\.0\.data\.reward: stands beside data",
    ),
    (
        "[{name: a, environment: b}, {name: a, environment: c}]",
        "environments: 2 entries have the name 'a'",
    ),
    (
        "[{name: a, environment: b, max_trajectories: 7}]",
        r"environments\.0\.max_trajectories 7 is less than one group of 8, so a would never play",
    ),
    (
        "[{name: a, environment: b, max_trajectories: 8}]",
        r"environments\.max_trajectories allow 1 groups of learner\.groups_per_step 32",
    ),
    (
        "[{name: a, environment: b}, {name: c, environment: d, group_size: 1}]",
        r"with environments\.1\.group_size 1 there are none",
    ),
    (
        "[{name: a, environment: b}]\ngenerator: {environment: frozen_lake}",
        r"generator\.environment and environments both say what answers the policy",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_a_contradiction_is_refused(load, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load(f"environments: {text}")
