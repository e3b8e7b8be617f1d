"""The `algorithm:` section: what it accepts, and the sentence for what it does not."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from streamrl.config import load_config, render, to_yaml
from streamrl.config.algorithm import AlgorithmSettings
from streamrl.config.algorithm.advantages import ADVANTAGE_SETTINGS
from streamrl.config.algorithm.rollout_is import (
    ROLLOUT_IS_PRESETS,
    RejectionRule,
    RolloutISSettings,
)
from streamrl.config.algorithm.settings import ALGORITHM_PRESETS
from streamrl.config.loading.explain import explain
from streamrl.errors import ConfigError


def test_the_default_is_the_preset_that_survives_lag() -> None:
    section = AlgorithmSettings()
    assert section.preset == "stream"
    assert section == AlgorithmSettings.model_validate({"preset": "stream"})
    with_others = AlgorithmSettings.model_validate({"entropy_coef": 0.1})
    assert with_others.loss == "vespo"


@pytest.mark.parametrize(
    "chosen",
    [
        {"advantage": "grpo"},
        {"advantage_config": {"whiten": True}},
        {"loss": "ppo"},
        {"loss_config": {"clip_ratio_high": 0.28}},
        {"proximal": "recompute"},
        {"rollout_is": "token_is"},
        {"preset": None},
    ],
)
def test_a_choice_of_ones_own_is_beside_grpo_ppo_and_token_importance_sampling(chosen) -> None:
    section = AlgorithmSettings.model_validate(chosen)
    assert section.preset is None
    assert (section.advantage, section.loss, section.proximal) == ("grpo", "ppo", "recompute")
    assert section.rollout_is == ROLLOUT_IS_PRESETS["token_is"]
    assert section.loss_config.loss_agg_mode == "token-mean"
    assert not section.needs_reference
    assert not section.needs_values


def test_a_rollout_is_section_changes_the_default_preset() -> None:
    """Its veto is on where it is asked for, or the preset has it."""
    section = AlgorithmSettings.model_validate({"rollout_is": {"threshold": 2.0}})
    assert section.rollout_is == ROLLOUT_IS_PRESETS["token_is"]
    assert section.rollout_is.veto_threshold is None
    vetoes = {name for name, preset in ROLLOUT_IS_PRESETS.items() if preset.veto_threshold}
    sequence = {"sequence_is_veto", "sequence_clip", "geometric_clip"}
    assert vetoes == {"metrics_only", "token_is_veto", *sequence}


@pytest.mark.parametrize("preset", ALGORITHM_PRESETS)
def test_a_preset_is_its_fields_below_those_that_are_given(tmp_path: Path, preset: str) -> None:
    fields = ALGORITHM_PRESETS[preset]
    named = AlgorithmSettings.model_validate({"preset": preset})
    spelled = AlgorithmSettings.model_validate(dict(fields))
    assert named.model_copy(update={"preset": None}) == spelled
    assert AlgorithmSettings.model_validate(named.model_dump()) == named
    changed = AlgorithmSettings.model_validate({"preset": preset, "rollout_is": "sequence_clip"})
    assert changed.rollout_is == ROLLOUT_IS_PRESETS["sequence_clip"]
    assert changed.loss == spelled.loss
    bounded = AlgorithmSettings.model_validate({"preset": preset, "rollout_is": {"threshold": 3.0}})
    kept = named.rollout_is.model_copy(update={"threshold": 3.0})
    assert bounded.rollout_is == kept
    whole = load_config(_minimal(tmp_path), [f"algorithm.preset={preset}"], {}).config
    assert whole.algorithm == named


def test_rollout_is_is_a_preset_or_a_record() -> None:
    named = AlgorithmSettings.model_validate({"rollout_is": "sequence_clip"})
    assert named.rollout_is == ROLLOUT_IS_PRESETS["sequence_clip"]
    record = {"level": "token", "mode": "truncate", "threshold": 2.0}
    spelled = AlgorithmSettings.model_validate({"rollout_is": record})
    assert spelled.rollout_is == RolloutISSettings()
    assert AlgorithmSettings.model_validate({"kl_reward": {"coef": 0.1}}).needs_reference
    assert AlgorithmSettings(advantage="gae").needs_values


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"advantage": "grop"}, "advantage: 'grop' is unknown; did you mean 'grpo'?"),
        ({"loss": "pppo"}, "loss: 'pppo' is unknown; did you mean 'ppo'?"),
        ({"rollout_is": {"treshold": 2.0}}, "did you mean 'threshold'?"),
        ({"rollout_is": {"threshold": 0.5}}, "must be below threshold, which is 0.5"),
        ({"rollout_is": {"threshold": "2_1"}}, "must be below threshold, which is 1"),
        ({"rollout_is": {"threshold": "a_b"}}, "must be a number or"),
        ({"rollout_is": {"threshold": "1_2", "mode": "truncate"}}, "do not go with it"),
        ({"rollout_is": {"rejection": [{"seq_k1": 2}]}}, "'seq_k1' is unknown"),
        ({"rollout_is": {"rejection": [{"token_k3": "0.1_2"}]}}, "only a k1 rule"),
        ({"rollout_is": {"rejection": [{"token_k1": 0.5}]}}, "must be below upper"),
        (
            {"rollout_is": {"rejection": [{"token_k1": 2}, {"token_k1": 3}]}},
            "token_k1 stands twice",
        ),
        ({"kl_loss": {"kind": "k4"}}, "kl_loss.kind: 'k4' is unknown"),
        ({"reward": {"agentic": {}, "norm_mean": "batch"}}, "set one or the other"),
        ({"reward": {"difficulty_low": 0.9, "difficulty_high": 0.1}}, "difficulty_low: is 0.9"),
        ({"reward": {"truncated": "penalize"}}, "set truncated: penalize and truncated_penalty"),
        ({"reward": {"truncated_penalty": 1.0}}, "truncated: is train and truncated_penalty is 1"),
        ({"reward": {"length": {"max_length": 4, "buffer": 5}}}, "at most max_length"),
        ({"kl_reward": {"kind": "full"}}, "is of kl_loss alone; allowed: abs, abs+, k1, "),
        ({"rl_loss_coef": 0}, "rl_loss_coef: was 0, and the loss has no other term"),
        (
            {
                "rl_loss_coef": 0,
                "entropy_coef": 0.1,
                "distillation": {"teachers": [{"path": "t"}]},
            },
            "so teachers cannot act",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    section: dict[str, object], said: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        AlgorithmSettings.model_validate(section)
    assert said in str(explain(caught.value, AlgorithmSettings))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["algorithm.loss_config.tau_pos=1.0"],
            "algorithm.loss_config.tau_pos: unknown key for loss ppo; it belongs to loss sapo "
            "(ppo has loss_agg_mode, loss_scale_factor, norm_by_sequences, clip_ratio_low, "
            "clip_ratio_high, clip_ratio_c) (--set algorithm.loss_config.tau_pos)",
        ),
        (
            ["algorithm.loss=gspo", "algorithm.loss_config.clip_ratio_c=3"],
            "unknown key for loss gspo; it belongs to loss ppo and dppo_tv and dppo_kl (gspo has",
        ),
        (
            ["algorithm.advantage_config.lam=0.9"],
            "algorithm.advantage_config.lam: unknown key for advantage grpo; it belongs to "
            "advantage gae (grpo has whiten, clip, norm_adv_by_std)",
        ),
        (
            ["algorithm.rollout_is={apply: false, batch_normalize: true}"],
            "rollout_is.batch_normalize: was True; threshold null or apply false",
        ),
        (["algorithm.loss=my.py"], "algorithm.loss: was 'my.py'; code of your own is named"),
    ],
)
def test_a_number_that_the_choice_does_not_read_is_refused(
    tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(_minimal(tmp_path), overrides, {})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("advantage", ADVANTAGE_SETTINGS)
def test_each_advantage_has_its_record(tmp_path: Path, advantage: str) -> None:
    rewards = "algorithm.advantage_config.rewards={reward/format: 0.5}"
    overrides = [f"algorithm.advantage={advantage}", *[rewards] * (advantage == "gdpo")]
    loaded = load_config(_minimal(tmp_path), overrides, {})
    assert type(loaded.config.algorithm.advantage_config) is ADVANTAGE_SETTINGS[advantage]
    (tmp_path / "resolved.yaml").write_text(to_yaml(loaded.config))
    assert load_config(tmp_path / "resolved.yaml", (), {}).config == loaded.config


def test_gdpo_names_its_rewards_and_leaves_nothing_to_shape(tmp_path: Path) -> None:
    chosen = ["algorithm.advantage=gdpo"]
    with pytest.raises(ConfigError, match=r"advantage_config\.rewards names, each normalized"):
        load_config(_minimal(tmp_path), chosen, {})
    chosen = [*chosen, "algorithm.advantage_config.rewards={reward/format: 0.5}"]
    for shaping in ("reward.clip=1", "reward.norm_mean=group", "kl_reward.coef=0.1"):
        with pytest.raises(ConfigError, match="gdpo normalizes each reward as it was recorded"):
            load_config(_minimal(tmp_path), [*chosen, f"algorithm.{shaping}"], {})
    load_config(_minimal(tmp_path), [*chosen, "algorithm.reward.difficulty_low=0.1"], {})
    load_config(_minimal(tmp_path), [*chosen, "data.rewards=[format]"], {})
    others = "data.rewards=[{reward: format, name: formats}]"
    with pytest.raises(ConfigError, match=r"none of data\.rewards; did you mean 'reward/formats'"):
        load_config(_minimal(tmp_path), [*chosen, others], {})


def test_the_numbers_of_a_loss_are_printed_with_their_origin(tmp_path: Path) -> None:
    several = "learner.updates_per_batch=2"
    overrides = ["algorithm.loss=sapo", "algorithm.loss_config.tau_neg=1.2", several]
    printed = render(load_config(_minimal(tmp_path), overrides, {}))
    lines = [line.split() for line in printed.splitlines()]
    assert ["tau_neg:", "1.2", "#", "--set", "algorithm.loss_config.tau_neg"] in lines
    assert ["tau_pos:", "1.0", "#", "default"] in lines
    assert "clip_ratio_c" not in printed


def _minimal(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: some-model}\ndata: {source: addition}\n")
    return path


def test_two_sided_thresholds_zero_outside() -> None:
    config = RolloutISSettings.model_validate({"threshold": "0.5_5.0"})
    assert (config.lower, config.threshold, config.mode) == (0.5, 5.0, "clip")
    assert RolloutISSettings.model_validate({"threshold": "3"}).threshold == 3.0


def test_rejection_rules_have_a_short_form() -> None:
    config = RolloutISSettings.model_validate(
        {"rejection": [{"token_k1": "0.4_1.5"}, {"seq_mean_k3": 0.1}]}
    )
    ratio, divergence = config.rejection
    assert ratio == RejectionRule(statistic="token_k1", lower=0.4, upper=1.5)
    assert divergence == RejectionRule(statistic="seq_mean_k3", upper=0.1)
    assert RejectionRule(statistic="seq_sum_k1", upper=4).ratio_lower == 0.25
