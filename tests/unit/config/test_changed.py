"""A configuration that is read back with other settings: what it had by default makes way."""

from pathlib import Path

import pytest

from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.loading.load import with_overrides
from streamrl.errors import ConfigError

GRPO = ("algorithm.preset=null",)
SEVERAL = (*GRPO, "learner.updates_per_batch=2")
SECTIONS = [
    (),
    GRPO,
    ("algorithm.rollout_is=off",),
    ("algorithm.preset=stream", "algorithm.rollout_is=off"),
    ("algorithm.preset=stream", "algorithm.rollout_is=sequence_clip"),
    ("algorithm.preset=stream", "algorithm.rollout_is={threshold: 3}"),
    ("algorithm.preset=stream", "algorithm.rollout_is={scale_lr: false}"),
    ("algorithm.preset=stream", "algorithm.loss=ppo", "algorithm.kl_loss.coef=0.1"),
    ("algorithm.rollout_is={threshold: 3, level: sequence}",),
    ("algorithm.rollout_is=vcpo", "algorithm.advantage=opob"),
    (*SEVERAL, "algorithm.loss=gspo", "algorithm.loss_config.clip_ratio_low=0.1"),
    (*SEVERAL, "algorithm.advantage=gae", "algorithm.value.clip_range=0.3"),
    ("algorithm.dynamic_sampling={}",),
]


def load(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text("data: {source: copy}\nmodel: {path: m}\n")
    return load_config(file, overrides, {}).config


@pytest.mark.parametrize("section", SECTIONS, ids=" ".join)
def test_the_rest_stays_as_it_is(tmp_path, section):
    config = load(tmp_path, *section)
    assert with_overrides(config, ["learner.num_threads=3"]).algorithm == config.algorithm
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "resolved.yaml", environment={}).config == config


@pytest.mark.parametrize("base", [(), GRPO, SEVERAL], ids=" ".join)
@pytest.mark.parametrize(
    "override",
    [
        "algorithm.loss=ppo",
        "algorithm.loss=dppo_tv",
        "algorithm.loss=reinforce",
        "algorithm.proximal=recompute",
        "algorithm.advantage=gae",
        "algorithm.advantage=opob",
        "algorithm.rollout_is=m2po",
        "learner.updates_per_batch=1",
    ],
)
def test_another_choice_comes_with_its_own_numbers(tmp_path, base, override):
    changed = with_overrides(load(tmp_path, *base), [override])
    named = ["algorithm.preset=stream"] if not base and override.startswith("algorithm") else []
    assert changed.algorithm == load(tmp_path, *base, *named, override).algorithm


def test_another_preset_replaces_all_that_a_preset_stands_for(tmp_path):
    stream, grpo = load(tmp_path), load(tmp_path, *GRPO)
    assert with_overrides(grpo, ["algorithm.preset=stream"]).algorithm == stream.algorithm
    assert with_overrides(stream, ["algorithm.preset=null"]).algorithm == grpo.algorithm


def test_a_preset_of_which_nothing_is_left_is_refused(tmp_path):
    text = to_yaml(load(tmp_path, *GRPO)).replace("preset: null", "preset: stream")
    (tmp_path / "resolved.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"algorithm\.preset: was stream, and advantage, loss"):
        load_config(tmp_path / "resolved.yaml", environment={})


@pytest.mark.parametrize(
    ("overrides", "environment"),
    [(["algorithm.preset=stream"], {}), ([], {"STREAMRL__ALGORITHM__PRESET": "stream"})],
)
def test_a_preset_replaces_what_sources_before_it_say_of_its_choices(
    tmp_path, overrides, environment
):
    stream, file = load(tmp_path), tmp_path / "recipe.yaml"
    choices = "rollout_is: token_is, loss_config: {clip_ratio_low: 0.1}, kl_loss: {coef: 0.1}"
    file.write_text(f"data: {{source: copy}}\nmodel: {{path: m}}\nalgorithm: {{{choices}}}\n")
    loaded = load_config(file, overrides, environment)
    coef = {"kl_loss": stream.algorithm.kl_loss.model_copy(update={"coef": 0.1})}
    assert loaded.config.algorithm == stream.algorithm.model_copy(update=coef)
    assert set(loaded.origins) >= {"algorithm.preset", "algorithm.kl_loss.coef"}
    assert "algorithm.rollout_is" not in loaded.origins
    beside = [*overrides, "algorithm.rollout_is=m2po"]
    assert load_config(file, beside, environment).config.algorithm.rollout_is.second_moment


def test_what_cannot_be_is_refused_with_its_place(tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean 'm2po'.* \(--set algorithm\.rollout_is\)"):
        with_overrides(load(tmp_path), ["algorithm.rollout_is=m2pp"])
