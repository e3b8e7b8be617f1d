"""Names of verl, ROLL, TRL and prime-rl are refused with what they are called here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from streamrl.config import load_config
from streamrl.config.algorithm.settings import NOT_ADVANTAGES, NOT_LOSSES
from streamrl.config.loading.foreign_names import (
    SYSTEMS,
    USUAL,
    foreign_names,
)
from streamrl.errors import ConfigError
from tests.settings import named_in, setting_names

MINIMAL = "model: {path: some-model}\ndata: {source: addition}\n"


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("actor_rollout_ref.rollout.n=8", "verl's name; here it is generator.group_size"),
        (
            "learner.ppo_mini_batch_size=64",
            "what verl calls ppo_mini_batch_size is here learner.groups_per_step",
        ),
        (
            "algorithm.kl_coef=0.1",
            "what ROLL calls kl_coef is here algorithm.kl_reward.coef",
        ),
        (
            "algorithm.mask_truncated_completions=true",
            "what TRL calls mask_truncated_completions is here algorithm.reward.truncated: mask",
        ),
        ("orchestrator.rollouts_per_example=8", "prime-rl's name; here it is generator.group_size"),
        ("trainer.loss.kl_tau=1", "here it is algorithm.loss, algorithm.loss_config and"),
        (
            "algorithm.loss_config.epsilon_high=0.3",
            "TRL calls epsilon_high is here algorithm.loss_config.clip_ratio_high",
        ),
        ("multi_turn.max_turns=4", "verl's name; here it is generator.episode.max_turns"),
        (
            "actor_rollout_ref.model.override_config.attention_dropout=0",
            "verl's name; there is no such setting here (the model's own config.json counts",
        ),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=1", "it is generator.engine_kwargs"),
        ("system_envs.RAY_PROFILING=1", "(daemons inherit the environment of streamrl launch)"),
        (
            "actor_infer.strategy_args.strategy_name=vllm",
            "ROLL's name; here it is generator.engine",
        ),
        (
            "actor_train.strategy_args.strategy_name=megatron_train",
            "ROLL's name; here it is learner.mesh, always by FSDP2",
        ),
    ],
)
def test_a_name_of_another_system_is_refused_with_ours(tmp_path, override, sentence):
    key = override.partition("=")[0]
    message = refusal(tmp_path, "", override)
    assert message.startswith(f"{key}: ")
    assert sentence in message
    assert message.endswith(f"(--set {key})")


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("TRL", "num_generations: 8\nlogging_steps: 10\nsave_steps: 5\n"),
        ("ROLL", "rollout_batch_size: 8\nlogging_steps: 10\nsave_steps: 5\n"),
        ("verl", "actor_rollout_ref: {rollout: {n: 5}}\ntrainer: {total_epochs: 1, nnodes: 2}\n"),
    ],
)
def test_a_file_of_another_system_is_known_by_most_of_its_names(tmp_path, system, text):
    *lines, last = refusal(tmp_path, text).splitlines()
    assert [line for line in lines if "'s name;" in line and f" {system}'s" not in line] == []
    command = f"streamrl import FILE --from {system.lower()}"
    assert last == f"3 of these are names of {system}: `{command}` translates its files"


GROUPS = "learner.groups_per_step, in groups of generator.group_size responses"
LENGTHS = "data.max_prompt_length for prompts and generator.max_new_tokens for responses"
CLIP = "algorithm.loss_config.clip_ratio_low and algorithm.loss_config.clip_ratio_high"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("learner.lr=1", "unknown key; what other systems call lr is here learner.optimizer.lr"),
        ("lr=1", "unknown key; here it is learner.optimizer.lr"),
        ("optimizer.lr=1", "unknown key; did you mean learner.optimizer.lr?"),
        ("generator.max_staleness=1", "unknown key; did you mean buffer.max_staleness?"),
        ("loss=grpo", "unknown key; did you mean algorithm.loss?"),
        ("device=cuda", "unknown key; did you mean generator.device or learner.device?"),
        ("generator.tensor_parallel_size=2", "generator.vllm.tensor_parallel_size"),
        ("max_setps=1", "unknown key; did you mean run.max_steps?"),
        ("batch_size=8", f"unknown key; here it is {GROUPS}"),
        (
            "learner.num_epochs=3",
            "unknown key; what other systems call num_epochs is here run.total_epochs",
        ),
        ("max_length=9", f"unknown key; here it is {LENGTHS}"),
        ("model.name=x", "unknown key; here it is model.path"),
        ("cluster.hosts=[{name: a}]", "(it has gone: start a Ray cluster on the machines, where"),
        ("algorithm.clip_eps=0.2", f"unknown key; what other systems call clip_eps is here {CLIP}"),
        ("algorithm.loss=grpo", "set algorithm.advantage: grpo and algorithm.loss: ppo"),
        ("algorithm.loss=GRPO", "was 'GRPO'; grpo is an advantage here"),
        ("algorithm.loss=dapo", "DAPO is algorithm.advantage: grpo and algorithm.loss: ppo with"),
        ("algorithm.advantage=ppo", "ppo is a loss here: set algorithm.loss: ppo; PPO's advantage"),
        ("algorithm.loss=ppoo", "'ppoo' is unknown; did you mean 'ppo'?"),
        ("model=Qwen", "model: was 'Qwen'; it is a section, with keys such as model.path, model."),
    ],
)
def test_what_a_newcomer_types_leads_to_the_setting(tmp_path, override, sentence):
    message = refusal(tmp_path, "", override)
    assert message.startswith(f"{override.partition('=')[0]}: ")
    assert sentence in message
    assert message.endswith(f"(--set {override.partition('=')[0]})")


def test_a_setting_under_another_section_of_the_file_is_found(tmp_path):
    message = refusal(tmp_path, "optimizer: {lr: 1, weight_decay: 2, magic: 3}\n")
    assert message.splitlines() == [
        f"optimizer.lr: unknown key; did you mean learner.optimizer.lr? ({tmp_path}/run.yaml:3)",
        "optimizer.weight_decay: unknown key; did you mean learner.optimizer.weight_decay? "
        f"({tmp_path}/run.yaml:3)",
        f"optimizer.magic: unknown key ({tmp_path}/run.yaml:3)",
    ]


def test_names_of_all_published_algorithms_lead_to_settings_that_are_valid(tmp_path):
    (tmp_path / "run.yaml").write_text(MINIMAL)
    for sentence in {*NOT_LOSSES.values(), *NOT_ADVANTAGES.values()}:
        named = re.findall(r"((?:algorithm|learner)\.[a-z_.]+): ([a-z0-9_.-]*[a-z0-9])", sentence)
        overrides = [f"{key}={value}" for key, value in named]
        if "algorithm.advantage=gdpo" in overrides:
            overrides = [*overrides, "algorithm.advantage_config.rewards={reward/exact: 1}"]
        if any(override.startswith("algorithm.echo_coef") for override in overrides):
            overrides = [*overrides, "generator.environment=frozen_lake"]
        load_config(tmp_path / "run.yaml", overrides, {})


def test_every_key_of_a_foreign_section_is_named_with_its_line(tmp_path):
    message = refusal(
        tmp_path, "actor_rollout_ref:\n  rollout:\n    n: 8\n    top_p: 0.9\n    spin: 1\n"
    )
    assert message.splitlines() == [
        "actor_rollout_ref.rollout.n: verl's name; here it is generator.group_size "
        f"({tmp_path}/run.yaml:5)",
        "actor_rollout_ref.rollout.top_p: verl's name; here it is generator.top_p "
        f"({tmp_path}/run.yaml:6)",
        f"actor_rollout_ref.rollout.spin: unknown key ({tmp_path}/run.yaml:7)",
    ]


def test_every_setting_that_a_table_names_exists():
    ours = setting_names()
    named = {
        setting
        for system in (*SYSTEMS, USUAL)
        for line in foreign_names(system).values()
        if not line.here.startswith("(")
        for setting in named_in(line.here.partition(":")[0])
    }
    assert named - ours == set()
    assert len(named) > 80


def test_every_setting_that_a_value_is_translated_to_exists():
    rules = [
        rule
        for system in SYSTEMS
        for line in foreign_names(system).values()
        for rule in yaml.safe_load(line.values.removeprefix("!") or "{}").values()
        if isinstance(rule, dict)
    ]
    named = {key for rule in rules for key in rule} | {rule.get("without") for rule in rules}
    assert named - {"without", None} - setting_names() == set()
    assert len(named) > 40


def test_the_tables_are_read_without_torch_and_when_a_key_is_unknown_alone(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    code = (
        "import sys; from streamrl.config import load_config; load_config(sys.argv[1]); "
        "from streamrl.config.loading.foreign_names import foreign_names; "
        "sys.exit('torch' in sys.modules or foreign_names.cache_info().misses > 0)"
    )
    command = [sys.executable, "-c", code, tmp_path / "run.yaml"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("algorithm.rollout_correction.loss_type", "here it is algorithm.loss"),
        ("reward.reward_model.model_path", "data.rewards with an entry reward_model, in kwargs p"),
        ("critic.loss_agg_mode", "here it is algorithm.value.loss_agg_mode"),
        ("actor_rollout_ref.actor.fsdp_config.qat.group_size", "quantization-aware training"),
        ("actor_rollout_ref.rollout.agent.num_workers", "here it is generator.max_num_seqs"),
    ],
)
def test_names_of_verl_that_end_as_others_do_are_its_own(tmp_path, key, sentence):
    message = refusal(tmp_path, "", f"{key}=1")
    assert f"{key}: verl's name; " in message
    assert sentence in message


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("vllm_importance_sampling_clip_max", "TRL's name; here it is algorithm.rollout_is.thresh"),
        ("log_level", "TRL's name; here it is run.log_level"),
        ("vespo_k_pos", "TRL's name; here it is algorithm.loss_config.k_pos"),
        ("train_infer_correction.is_weight.upper_bound", "it is algorithm.rollout_is.threshold"),
        (
            "something.batch_size",
            "unknown key; what other systems call batch_size is here learner.groups_per_step",
        ),
    ],
)
def test_names_of_todays_releases_are_known(tmp_path, key, sentence):
    assert sentence in refusal(tmp_path, "", f"{key}=1")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("algorithm.loss=vanilla", "; verl's vanilla is ppo here"),
        ("generator.top_k=-1", "; verl's -1 is 0 here"),
        ("learner.optimizer.schedule=constant_with_warmup", "is constant here"),
        ("algorithm.rollout_is=true", "; verl's true is algorithm.rollout_is.apply: true here"),
        ("algorithm.reward.format_penalty=-0.5", "; ROLL's -0.5 is 0.5 here"),
        ("generator.max_new_tokens=${response_length}", "; nothing is filled in for ${...}: write"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "here it is algorithm.loss: ppo"),
        ("trainer.resume_mode=disable", "verl's name; here it is run.resume: never"),
        ("trainer.resume_mode=resume_path", "verl's name; here it is run.resume ("),
        ("actor_rollout_ref.actor.clip_ratio=0.3", f"{CLIP.partition(' and')[0]}: 0.3, algorithm"),
        ("actor_rollout_ref.actor.use_kl_loss=false", "here it is leave out algorithm.kl_loss"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "divided by learner.updates_per_batch"),
        ("beta=0.1", "algorithm.kl_loss.coef: 0.1, algorithm.kl_loss.kind: low_var_kl+"),
        ("loss_type=dr_grpo", "here it is algorithm.loss: ppo, algorithm.loss_config.loss_agg_mod"),
    ],
)
def test_a_value_of_another_system_is_answered_with_ours(tmp_path, override, sentence):
    assert sentence in refusal(tmp_path, "", override)


def test_a_value_that_is_nobodys_is_answered_as_before(tmp_path):
    for override in ("generator.top_k=-5", "algorithm.reward.format_penalty=much"):
        message = refusal(tmp_path, "", override)
        assert "'s " not in message, message
