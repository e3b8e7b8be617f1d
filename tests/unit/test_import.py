"""`streamrl import` makes a configuration that `streamrl check` takes, of files in the shape of
those that verl, ROLL and TRL come with."""

import json
from pathlib import Path

import pytest
import yaml

from streamrl.cli.check.command import refusals, run_findings
from streamrl.cli.import_file import (
    SYSTEMS as COMMANDS,
    _in_our_form,
    _problem,
    imported as import_of,
)
from streamrl.cli.main import main
from streamrl.config import load_config
from streamrl.config.loading.foreign_names import SYSTEMS, foreign_names
from streamrl.config.loading.foreign_names.files import read_keys
from streamrl.config.loading.foreign_names.values import WITHOUT, default_of, translate

EXAMPLES = Path(__file__).parents[1] / "data" / "foreign"
FILES = sorted(path for path in EXAMPLES.glob("*/*.*"))
ROW = {
    "prompt": [{"role": "user", "content": "1+1"}],
    "messages": [{"role": "user", "content": "1+1"}],
    "answer": "2",
    "solution": "2",
    "tag": "deepmath",
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder, with rows."""
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [ROW | {"id": number} for number in range(70)]
    (tmp_path / "rows").mkdir()
    for name in ("train", "test", "a", "b"):
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / f"rows/{name}.parquet")
        (tmp_path / f"rows/{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(path: Path, system: str, output: str = "run.yaml") -> tuple[dict, list[str]]:
    """Its settings by dotted name, and its comments."""
    assert main(["import", str(path), "--from", system, "--output", output]) == 0
    text = Path(output).read_text()
    assert "To be mended" not in text
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    return dict(leaves(yaml.safe_load(text))), lines


def leaves(tree: dict, prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def has_line(comments: list[str], *words: str) -> bool:
    return any(all(word in line for word in words) for line in comments)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_check_takes_what_is_imported(folder, path):
    settings, comments = imported(path, path.parent.name)
    Path("chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    # A model that would be made, in place of the one that the file names.
    own = ["model.recipe.num_layers=1", "data.chat_template=chat.jinja"]
    loaded = load_config("run.yaml", ["tracking.wandb=off", *own], {})
    assert loaded.config.algorithm.preset is None
    assert settings["model.path"] == "models/base"
    assert comments[0].startswith(f"From {path.name} of ")
    refused = refusals(run_findings(loaded))
    assert [line for line in refused if "vLLM is not installed here" not in line] == []


def test_a_script_of_verl_with_its_variables_and_what_verl_does_by_default(folder):
    settings, comments = imported(EXAMPLES / "verl" / "grpo.sh", "verl")
    expected = {
        "data.truncation": "filter",
        "data.answer_key": "reward_model.ground_truth",
        "generator.max_new_tokens": 128,
        "generator.group_size": 5,
        "learner.groups_per_step": 64,
        "learner.updates_per_batch": 4,
        "learner.dtype": "bfloat16",
        "algorithm.loss": "ppo",
        "algorithm.kl_loss.coef": 0.001,
        "tracking.wandb": "online",
        "run.max_steps": 100,
    }
    assert {name: settings.get(name) for name in expected} == expected
    assert "run.total_epochs" not in settings
    assert not any(name.startswith("algorithm.kl_reward") for name in settings)
    assert has_line(comments, "override_config.attention_dropout: 0.0; the model's own config.json")
    assert has_line(comments, "ppo_micro_batch_size_per_gpu: 4; here it is", "tokens, not samples")
    assert has_line(comments, "use_remove_padding: true; sequences are always packed")


def test_defaults_interpolation_and_the_critic_of_verl(folder):
    settings, comments = imported(EXAMPLES / "verl" / "ppo.yaml", "verl")
    assert settings["run.folder"] == "checkpoints/sums/ppo"
    assert settings["learner.groups_per_step"] == 32
    assert settings["algorithm.advantage"] == "gae"
    assert settings["algorithm.value.lr"] == 1e-5
    assert settings["run.resume"] == "never"
    assert settings["run.evaluate"] is False
    assert has_line(comments, "defaults: no file 'ppo_trainer'; verl's own defaults stand")
    assert settings["algorithm.value.model_path"] == "models/value"
    assert settings["algorithm.value.weight_decay"] == 0.01
    assert has_line(comments, "actor.clip_ratio: 0.2; ", "with one update a batch")


def test_rollout_correction_of_verl(folder):
    settings, _ = imported(EXAMPLES / "verl" / "correction.yaml", "verl")
    assert settings["algorithm.rollout_is.threshold"] == "0.5_5.0"
    assert settings["algorithm.rollout_is.rejection"] == [{"seq_mean_k3": 0.1}]
    assert settings["learner.lora.rank"] == 8
    assert settings["data.source"] == [{"path": "rows/a.parquet"}, {"path": "rows/b.parquet"}]


def test_files_that_roll_takes_as_defaults_and_roles_of_its_own(folder):
    settings, comments = imported(EXAMPLES / "roll" / "rlvr.yaml", "roll")
    expected = {
        "generator.max_new_tokens": 256,
        "generator.dtype": "bfloat16",
        "generator.temperature": 0.99,
        "validation.temperature": 0.7,
        "learner.gradient_checkpointing": True,
        "data.eval_source": "rows/test.jsonl",
        "data.prompt_key": "messages",
        "algorithm.reward.truncated": "mask",
        "tracking.tensorboard": True,
    }
    assert {name: settings.get(name) for name in expected} == expected
    assert has_line(comments, "strategy_config.zero_optimization.stage: 3; here it is learner.mesh")
    assert settings["data.rewards"] == [
        {"reward": "math", "name": "math_rule", "data_source": ["deepmath"]}
    ]
    assert settings["data.data_source_key"] == "tag"


def test_the_critic_of_roll_begins_as_its_reward_model(folder):
    settings, comments = imported(EXAMPLES / "roll" / "ppo.yaml", "roll")
    assert settings["algorithm.value.model_path"] == "models/base"
    line = "critic.training_args.per_device_train_batch_size: 2; here it is algorithm.value.max_tok"
    assert has_line(comments, line)


def test_two_names_that_are_one_setting_are_read_together(folder):
    Path("a.yaml").write_text(
        "pretrain: models/base\nadv_estimator: gae\nactor_train:\n"
        "  data_args: {file_name: rows/train.jsonl}\n"
        "  training_args: {adam_beta1: 0.8, adam_beta2: 0.95}\n"
        "critic: {training_args: {adam_beta2: 0.95, max_grad_norm: 0.5}}\n"
    )
    settings, _ = imported(Path("a.yaml"), "roll")
    assert settings["learner.optimizer.betas"] == [0.8, 0.95]
    assert settings["algorithm.value.betas"] == [0.9, 0.95]
    assert settings["algorithm.value.max_grad_norm"] == 0.5


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_defaults_of_a_release_are_values_of_ours(system):
    """Whatever the other settings are: of the right kind, unit and sign."""
    names = foreign_names(system)
    for name in names.values():
        if not name.default or "${" in name.default:
            continue
        value = default_of(name)
        ours = translate(name, value, lambda other: default_of(names[other])) or {}
        for setting in ours.keys() - {WITHOUT}:
            tree = {setting: _in_our_form(setting, ours[setting])}
            problem = _problem({"model.path": "m", "data.source": "addition", **tree})
            assert "input should" not in problem, (name.name, problem)
            assert "did you mean" not in problem, (name.name, problem)


def test_no_key_of_a_service_is_written_and_penalties_lose_their_minus(folder):
    settings, comments = imported(EXAMPLES / "roll" / "agentic.yaml", "roll")
    assert "not-a-key" not in Path("run.yaml").read_text()
    assert has_line(comments, "tracker_kwargs.api_key: ***; keys of services are environment")
    assert settings["generator.top_k"] == 0
    assert has_line(comments, "train_env_manager.format_penalty: -0.15; ", "was 0.15")
    lora, _ = imported(EXAMPLES / "roll" / "lora.yaml", "roll", "lora.yaml")
    assert lora["learner.lora.targets"] == ["q_proj", "v_proj"]
    assert lora["generator.engine"] == "vllm"


def test_batches_of_trl_are_counted_in_groups(folder):
    settings, comments = imported(EXAMPLES / "trl" / "grpo.yaml", "trl")
    assert (settings["tracking.wandb"], settings["tracking.trackio"]) == ("online", True)
    assert settings["learner.groups_per_step"] == 4
    assert settings["algorithm.kl_loss.kind"] == "low_var_kl+"
    assert settings["algorithm.advantage_config.norm_adv_by_std"] is False
    assert settings["learner.optimizer.betas"] == [0.9, 0.999]
    assert has_line(comments, "push_to_hub: false; nothing is pushed to a hub")
    options, _ = imported(EXAMPLES / "trl" / "grpo.sh", "trl", "options.yaml")
    assert options["learner.lora.targets"] == ["q_proj", "v_proj"]
    assert options["data.reward"] == "math"
    arithmetic = (
        "# per_device_train_batch_size 8 * gradient_accumulation_steps 4 * num_processes 1 "
        "(a default) / num_generations 8\n"
    )
    assert arithmetic in Path("run.yaml").read_text()
    several, _ = imported(EXAMPLES / "trl" / "gspo.yaml", "trl", "several.yaml")
    assert several["algorithm.loss"] == "gspo"
    assert several["learner.updates_per_batch"] == 4


@pytest.mark.parametrize(
    ("system", "text", "bounds"),
    [
        ("TRL", "loss_type: cispo\nepsilon: 0.2\nepsilon_high: 5.0\n", (1, 4)),
        ("ROLL", "pg_variant: cispo\ncispo_epsilon_low: 0.3\ncispo_epsilon_high: 4.0\n", (0.3, 4)),
        (
            "verl",
            "actor_rollout_ref:\n  actor:\n    clip_ratio_low: 1.0\n    clip_ratio_high: 3.0\n"
            "    policy_loss: {loss_mode: cispo}\n",
            (1, 3),
        ),
    ],
)
def test_the_bounds_of_cispo_are_those_of_the_other_system(folder, system, text, bounds):
    """TRL has no lower one, and its upper one is the ratio itself."""
    Path("theirs.yaml").write_text(text)
    settings = yaml.safe_load(import_of(Path("theirs.yaml"), system).text)["algorithm"]
    assert settings["loss"] == "cispo"
    numbers = "clip_ratio_low", "clip_ratio_high"
    assert tuple(settings["loss_config"][name] for name in numbers) == bounds


def test_the_batch_of_trl_is_that_of_all_processes(folder):
    text = (EXAMPLES / "trl" / "grpo.sh").read_text()
    for name, more, expected in (
        ("processes", "--num_processes 4 ", {"groups_per_step": 4}),
        (
            "generation",
            "--num_processes 2 --generation_batch_size 64 --gradient_accumulation_steps 2 ",
            {"groups_per_step": 8, "updates_per_batch": 2},
        ),
        (
            "steps",
            "--num_processes 2 --steps_per_generation 4 --gradient_accumulation_steps 2 ",
            {"groups_per_step": 8, "updates_per_batch": 2},
        ),
    ):
        script = folder / f"{name}.sh"
        script.write_text(text.replace("accelerate launch", f"accelerate launch {more}"))
        settings, _ = imported(script, "trl", f"{name}.yaml")
        assert {key: settings[f"learner.{key}"] for key in expected} == expected, name


def test_a_batch_that_is_no_whole_number_of_groups_is_said_with_its_arithmetic(folder):
    Path("trl.yaml").write_text(
        "model_name_or_path: m\ndataset_name: rows/train.jsonl\n"
        "per_device_train_batch_size: 2\nnum_generations: 8\n"
    )
    _, comments = imported(Path("trl.yaml"), "trl")
    assert has_line(comments, "per_device_train_batch_size: 2; per_device_train_batch_size 2 * ")
    assert has_line(comments, "num_processes 1 (a default) / num_generations 8; learner.groups_per")


def test_a_batch_of_verl_is_counted_in_prompts(folder):
    settings, _ = imported(EXAMPLES / "verl" / "grpo.sh", "verl")
    assert (settings["learner.groups_per_step"], settings["learner.updates_per_batch"]) == (64, 4)
    text = Path("run.yaml").read_text()
    assert "# data.train_batch_size 64 / actor_rollout_ref.actor.ppo_mini_batch_size 16" in text


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("a: [1", "a.yaml", "a.yaml is not YAML: "),
        ("- 1\n", "a.yaml", "has no settings; give a YAML file, or a shell script (.sh)"),
        ("echo nothing\n", "a.sh", "has no settings"),
        ("import trl\n", "a.py", "a.py: Python is not read; write the arguments that it gives"),
        ("defaults: [a]\nx: 1\n", "a.yaml", "a.yaml: defaults: a is the file itself"),
        ("defaults: 5\nx: 1\n", "a.yaml", "a.yaml: defaults: was 5; it must be a list of files"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(folder, capsys, text, name, sentence):
    Path(name).write_text(text)
    assert main(["import", name, "--from", "verl"]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["import", "nowhere.yaml", "--from", "verl"]) == 2
    assert "cannot read nowhere.yaml" in capsys.readouterr().err


def test_files_that_include_each_other_are_refused(folder, capsys):
    Path("a.yaml").write_text("defaults: [b]\n")
    Path("b.yaml").write_text("defaults: [a]\n")
    assert main(["import", "a.yaml", "--from", "verl"]) == 2
    assert "b.yaml: defaults: a is the file itself, or includes it" in capsys.readouterr().err


def test_what_cannot_be_filled_in_is_said_and_nothing_is_written_over(folder, capsys):
    Path("a.yaml").write_text(
        "algorithm: {gamma: '${loop}'}\nloop: ${algorithm.gamma}\n"
        "data: {seed: '${oc.env:SEED,7}', max_prompt_length: '${eval:1+1}'}\nbrand: {new: 1}\n"
        "ring: ['${ring}', {again: '${ring}'}]\nb0: xxxx\n"
        + "".join(f"b{i}: '${{b{i - 1}}}${{b{i - 1}}}'\n" for i in range(1, 20))
    )
    settings, comments = imported(Path("a.yaml"), "verl", "b.yaml")
    assert settings["run.seed"] == 7
    assert has_line(comments, "data.max_prompt_length: ${eval:1+1}; what ${...} stands for is not")
    assert has_line(comments, "algorithm.gamma: ", "what ${...} stands for is not in the file")
    assert has_line(comments, "brand.new: 1; no key that is known of verl")
    assert main(["import", "a.yaml", "--from", "verl", "--output", "b.yaml"]) == 2
    assert "--output: b.yaml exists already" in capsys.readouterr().err


def test_groups_of_files_and_epochs_are_taken_as_hydra_takes_them(folder):
    for name, text in {
        "run.yaml": (
            "defaults:\n- model_engine: dp\n"
            "- actor@actor_rollout_ref.actor: ${model_engine}_actor\n"
            "- extra/more@_here_\n- _self_\n"
            "data: {train_files: rows/train.parquet, train_batch_size: 7}\n"
            "trainer: {total_epochs: 3}\nactor_rollout_ref.rollout.name: ???\n"
        ),
        "model_engine/dp.yaml": "# @package _global_\nalgorithm: {adv_estimator: reinforce}\n",
        "actor/dp_actor.yaml": "ppo_mini_batch_size: 7\noptim: {lr: 3e-6}\n",
        "extra/more.yaml": "data: {train_batch_size: 9, max_prompt_length: 99}\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    settings, comments = imported(Path("run.yaml"), "verl", "mine.yaml")
    assert settings["algorithm.advantage"] == "reinforce"
    assert settings["learner.optimizer.lr"] == 3e-6
    assert settings["data.max_prompt_length"] == 99
    assert settings["learner.groups_per_step"] == 7
    assert settings["run.total_epochs"] == 3
    assert load_config("mine.yaml", [], {}).config.run.max_steps == 30
    assert has_line(comments, "actor_rollout_ref.rollout.name: ???; has no value there")


def test_a_data_set_of_the_hub_with_its_subset_and_splits(folder):
    Path("trl.yaml").write_text(
        "model_name_or_path: m\ndataset_name: team/sums\ndataset_config: default\n"
        "dataset_test_split: held_out\neval_strategy: steps\neval_steps: 5\n"
    )
    settings, _ = imported(Path("trl.yaml"), "trl")
    record = {"path": "datasets:team/sums", "subset": "default"}
    assert settings["data.source"] == [{**record, "split": "train"}]
    assert settings["data.eval_source"] == [{**record, "split": "held_out"}]
    Path("file.yaml").write_text(
        "model_name_or_path: m\ndataset_name: rows/new.jsonl\neval_strategy: steps\n"
    )
    settings, _ = imported(Path("file.yaml"), "trl", "of-file.yaml")
    assert (settings["data.source"], settings["run.evaluate"]) == ("rows/new.jsonl", False)
    Path("folder.yaml").write_text("model_name_or_path: m\ndataset_name: rows\n")
    settings, _ = imported(Path("folder.yaml"), "trl", "of-folder.yaml")
    assert settings["data.source"] == [{"path": "rows", "split": "train"}]


THINKS = {"reward": "regex", "kwargs": {"pattern": "<think>(?!.*<think>).*?</think>.*"}}


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        (
            "reward_funcs: [rewards.reward_len, think_format_reward]\nreward_weights: [1, 0.5]\n",
            [{"reward": "rewards.py:reward_len", "weight": 1}, THINKS | {"weight": 0.5}],
        ),
        ("reward_funcs: lib.own.score\n", "lib/own.py:score"),
        ("reward_funcs: trl.rewards.reasoning_accuracy_reward\n", "math"),
        # Called as ours is, and not of ours.
        ("reward_funcs: format\n", "PATH.py:format"),
        ("reward_funcs: [team/judge]\n", "reward_model"),
        ("reward_model_name_or_path: team/judge\n", "reward_model"),
        (
            "reward_funcs: [get_soft_overlong_punishment, not a name]\n",
            [
                {"reward": "length", "kwargs": {"max_tokens": 1024, "decay_tokens": 256}},
                {"reward": "PATH.py:NAME"},
            ],
        ),
    ],
)
def test_rewards_of_trl_are_ours_or_to_be_named(folder, capsys, text, rewards):
    Path("trl.yaml").write_text(
        f"model_name_or_path: m\ndataset_name: rows/train.jsonl\nnum_generations: 4\n{text}"
    )
    assert main(["import", "trl.yaml", "--from", "trl", "--output", "run.yaml"]) == 0
    settings = dict(leaves(yaml.safe_load(Path("run.yaml").read_text())))
    assert (settings.get("data.rewards") or settings["data.reward"]) == rewards
    err = capsys.readouterr().err
    assert "exact_match" not in err
    if ".py:" in str(rewards):
        assert "is to be there, a function of your own in verl's form, TRL's or ours" in err
        own = ["model.recipe.num_layers=1", "data.chat_template=none"]
        refused = refusals(run_findings(load_config("run.yaml", own, {})))
        assert any(
            "there is no file" in line and "give the path of one" in line for line in refused
        )


@pytest.mark.parametrize(
    ("system", "text", "rewards"),
    [
        (
            "verl",
            "reward_model: {enable: true, model: {path: team/judge}, reward_manager: dapo}\n",
            ("reward_model", {"path": "team/judge"}),
        ),
        ("verl", "reward: {reward_model: {enable: true}}\n", ("reward_model", None)),
        (
            "verl",
            "custom_reward_function: {path: own.py, name: score}\nreward_model: {enable: true}\n",
            ("own.py:score", None),
        ),
        ("verl", "custom_reward_function: {path: own.py}\n", ("own.py:compute_score", None)),
        (
            "verl",
            "reward.custom_reward_function: {path: own.py, name: f, reward_kwargs: {path: 1}}\n",
            ("own.py:f", {"path": 1}),
        ),
        ("verl", "reward: {reward_manager: {name: prime}}\n", ("PATH.py:NAME", None)),
        ("verl", "reward_model: {reward_manager: naive, enable: false}\n", ("math", None)),
        ("verl", "data: {train_files: a.parquet}\n", ("math", None)),
        ("roll", "rollout_batch_size: 8\n", (None, None)),
        ("roll", "reward: {worker_cls: lib.Mine}\n", ("PATH.py:NAME", None)),
        ("roll", "rewards: {a: {tag_included: [x]}}\n", ("PATH.py:NAME", None)),
    ],
)
def test_a_reward_that_is_named_is_never_a_default(folder, system, text, rewards):
    Path("a.yaml").write_text(text)
    assert main(["import", "a.yaml", "--from", system, "--output", "run.yaml"]) == 0
    settings = dict(leaves(yaml.safe_load(Path("run.yaml").read_text())))
    kwargs = {"path": settings["data.reward_kwargs.path"]} if rewards[1] else None
    assert (settings.get("data.reward"), kwargs) == rewards
    for reward, name in (("exact_match", None), ("math", "math")):
        said = f"# data.reward: {reward}, as no key names a reward"
        assert (said in Path("run.yaml").read_text()) == (rewards[0] == name)


def test_the_rewards_of_roll_are_those_of_its_domains(folder):
    workers = "roll.pipeline.rlvr.rewards"
    Path("a.yaml").write_text(
        "rewards:\n"
        f"  sums: {{worker_cls: {workers}.math_rule_reward_worker.MathRuleRewardWorker,"
        " tag_included: [a, b], world_size: 8}\n"
        f"  rules: {{worker_cls: {workers}.ifeval_rule_reward_worker.IfEvalRuleRewardWorker}}\n"
    )
    assert main(["import", "a.yaml", "--from", "roll", "--output", "run.yaml"]) == 0
    text = Path("run.yaml").read_text()
    assert yaml.safe_load(text)["data"]["rewards"] == [
        {"reward": "math", "name": "sums", "data_source": ["a", "b"]},
        {"reward": "PATH.py:IfEvalRuleRewardWorker", "name": "rules"},
    ]
    assert "# rewards.sums.world_size: 8; here it is data.rewards" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_key_stands_behind_a_setting_or_as_a_comment(folder, path):
    system = path.parent.name
    names = foreign_names(COMMANDS[system])
    values, _ = read_keys(path, lambda name: default_of(names[name]))
    imported(path, system)
    text = Path("run.yaml").read_text()
    shown = {word.rstrip(":,") for word in text.split()}
    # What switches a section on has its settings below, and what is read with another key its own.
    assert {key for key, value in values.items() if value is not None} - shown <= {
        "adam_beta1",
        "algorithm.filter_groups.enable",
        "algorithm.rollout_correction.rollout_rs_threshold",
        "dataset_train_split",
        "reward_weights",
        "rewards.math_rule.tag_included",
        "use_peft",
    }


def test_what_holds_already_and_what_another_key_sets_is_said(folder):
    Path("trl.yaml").write_text(
        "model_name_or_path: m\ndataset_name: rows/train.jsonl\nlog_completions: true\n"
        "vllm_mode: colocate\nnum_train_epochs: 2\nmax_steps: 10\nbeta: 0\n"
        "eval_strategy: 'no'\neval_steps: 5\nepsilon: 0.2\nmax_prompt_length: null\n"
    )
    _, comments = imported(Path("trl.yaml"), "trl")
    for line in (
        "log_completions: true; here it is tracking.samples.num_groups",
        "vllm_mode: colocate; here it is generator.vllm.url",
        "num_train_epochs: 2; here it is run.total_epochs, which max_steps leaves out",
        "beta: 0; algorithm.kl_loss is left out",
        "eval_steps: 5; here it is validation.every, which eval_strategy leaves out",
    ):
        assert has_line(comments, line), line
    assert not has_line(comments, "max_prompt_length")
    Path("verl.yaml").write_text(
        "custom_reward_function: {path: a.py, name: f}\n"
        "reward.custom_reward_function: {path: b.py, name: g}\n"
    )
    assert main(["import", "verl.yaml", "--from", "verl", "--output", "both.yaml"]) == 0
    sentence = "here it is data.reward, which reward.custom_reward_function.path sets"
    assert sentence in Path("both.yaml").read_text()


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("accelerate launch --config_file z3.yaml -m trl.scripts.grpo", "z3.yaml"),
        ("accelerate launch --multi_gpu --config_file z3.yaml train.py", "z3.yaml"),
        ("accelerate launch --config_file=z3.yaml --use_deepspeed train.py", "z3.yaml"),
        ("python3 -m accelerate.commands.launch --config_file z3.yaml --module my.grpo", "z3.yaml"),
        ("trl grpo --config_file z3.yaml", "z3.yaml"),
    ],
)
def test_options_of_a_launcher_end_at_the_script(folder, launcher, expected):
    Path("a.sh").write_text(f"{launcher} --model_name_or_path m --reward_funcs a.b c.d --x\n")
    names = foreign_names("TRL")
    values, _ = read_keys(Path("a.sh"), lambda name: default_of(names[name]))
    flags = {name: True for name in ("multi_gpu", "use_deepspeed") if name in launcher}
    assert values == flags | {
        "config_file": expected,
        "model_name_or_path": "m",
        "reward_funcs": ["a.b", "c.d"],
        "x": True,
    }


def test_the_command_says_what_it_wrote_and_which_keys_it_does_not_know(folder, capsys):
    Path("trl.yaml").write_text(
        "dataset_name: rows/train.jsonl\nreward_funcs: accuracy_reward\n"
        "model_name_or_path: m\nbetta: 0.1\nqqqq: 1\npush_to_hub: true\n"
    )
    imported(Path("trl.yaml"), "trl")
    assert capsys.readouterr().err == (
        "wrote run.yaml\nkeys without a counterpart, or with another form here: 3 (comments at its "
        "end)\n"
        "keys that are not known: betta (did you mean beta?), qqqq\n"
    )
    assert main(["import", "trl.yaml", "--from", "trl"]) == 0
    streams = capsys.readouterr()
    assert yaml.safe_load(streams.out) == yaml.safe_load(Path("run.yaml").read_text())
    assert streams.err.startswith("keys without a counterpart, or with another form here: 3")
    Path("none.yaml").write_text("dataset_name: rows/train.jsonl\nbetta: 1\n")
    assert main(["import", "none.yaml", "--from", "trl", "--output", "other.yaml"]) == 0
    err = capsys.readouterr().err
    assert err.startswith(
        "wrote other.yaml\nkeys without a counterpart, or with another form here: 1 (comments at "
        "its end)\nkeys that are not known: betta"
    )
    assert "\ndata.reward: exact_match, as no key names a reward\n" in err
    assert "\nTo be mended: model" in err
    Path("twice.yaml").write_text(
        "model_name_or_path: m\ndataset_name: rows/train.jsonl\nreward_funcs: [a.same, b.same]\n"
    )
    assert main(["import", "twice.yaml", "--from", "trl"]) == 0
    assert "To be mended: data: two rewards are called 'same'" in capsys.readouterr().err
