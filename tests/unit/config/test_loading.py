"""The configuration reads what a person writes and says clearly what cannot work."""

from pathlib import Path

import pytest
import yaml

from streamrl.config import RunConfig, load_config, render, to_yaml
from streamrl.errors import ConfigError

MINIMAL = "model: {path: some-model}\ndata: {source: addition}\n"


def load(tmp_path: Path, text: str = MINIMAL, *overrides: str, **environment: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides, environment).config


def refusal(tmp_path: Path, text: str = MINIMAL, *overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides, **environment)
    return str(caught.value)


def test_a_model_and_a_source_are_enough(tmp_path):
    config = load(tmp_path)
    assert config.run.max_steps == 100
    assert config.algorithm.preset == "stream"


@pytest.mark.parametrize("text", ["3e-6", "3E-6", "0.000003", "3.0e-06", "'3e-6'"])
def test_a_number_is_a_number_however_it_is_written(tmp_path, text):
    assert load(tmp_path, MINIMAL, f"learner.optimizer.lr={text}").learner.optimizer.lr == 3e-6


@pytest.mark.parametrize(("text", "value"), [("off", "off"), ("1e3", 1000.0), ("007", "007")])
def test_scalars_follow_yaml_1_2(tmp_path, text, value):
    config = load(tmp_path, MINIMAL, f"generator.engine_kwargs={{x: {text}}}")
    assert config.generator.engine_kwargs == {"x": value}


def test_the_command_line_wins_over_the_environment_over_the_file(tmp_path):
    text = MINIMAL + "run: {seed: 1, max_steps: 1, name: file}\n"
    environment = {"STREAMRL__RUN__SEED": "2", "STREAMRL__RUN__MAX_STEPS": "2"}
    run = load(tmp_path, text, "run.seed=3", **environment).run
    assert (run.seed, run.max_steps, run.name) == (3, 2, "file")


def test_of_what_was_set_records_have_no_nulls(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {source: [{path: a.jsonl, weight: 2}]}\n")
    printed = render(load_config(path, [], {}), with_defaults=False)
    assert "source: [{path: a.jsonl, weight: 2.0, name: '', kwargs: {}}]" in printed


def test_every_value_is_printed_with_where_it_came_from(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + "run:\n  seed: 1\n")
    printed = render(load_config(path, ["run.name=x"], {"STREAMRL__RUN__MAX_STEPS": "7"}))
    origins = {
        line.split(":")[0].strip(): line.split("# ")[1]
        for line in printed.splitlines()
        if "#" in line
    }
    assert origins["seed"] == f"{path}:4"
    assert origins["name"] == "--set run.name"
    assert origins["max_steps"] == "environment STREAMRL__RUN__MAX_STEPS"
    assert origins["folder"] == "default"
    assert yaml.safe_load(printed)["run"]["max_steps"] == 7


def test_a_long_value_does_not_push_every_origin_to_the_right(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL + f"run: {{folder: {'x' * 300}}}\n")
    lines = render(load_config(path, [], {})).splitlines()
    columns = {line.index("  #") for line in lines if line.endswith("# default")}
    assert max(columns) <= 60
    assert f"  folder: {'x' * 300}  # {path}:3" in lines


def test_the_resolved_file_reads_back_to_the_same(tmp_path):
    config = load(tmp_path, MINIMAL, "generator.stop_token_ids=[1, 2]", "learner.optimizer.lr=1e-5")
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "resolved.yaml", environment={}).config == config


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.max_stepz=1", "run.max_stepz: unknown key; did you mean 'max_steps'?"),
        ("rum.seed=1", "rum: unknown key; did you mean 'run'?"),
        ("learner.optimizer.learning=1", "learner.optimizer.learning: unknown key; allowed: betas"),
        ("run.max_steps=soon", "run.max_steps: was 'soon'; input should be a valid integer"),
        ("run.max_steps=true", "run.max_steps: was True; true and false are no numbers (--set run"),
        (
            "generator.temperature=false",
            "generator.temperature: was False; true and false are no numbers",
        ),
        (
            "algorithm.rollout_is.threshold=true",
            "threshold: was True; true and false are no numbers",
        ),
        ("generator.count=true", "generator.count: was True; true and false are no numbers"),
        (
            "learner.optimizer.betas=[false, 0.9]",
            "betas: was [False, 0.9]; true and false are no numbers",
        ),
        ("run.max_steps=1.5", "got a number with a fractional part (--set run.max_steps)"),
        ("learner.optimizer.LR=1", "learner.optimizer.LR: unknown key; did you mean 'lr'?"),
        (
            "environments=[{name: a, environment: single_turn, data: {Shuffle: true}}]",
            "environments.0.data.Shuffle: unknown key; did you mean 'shuffle'?",
        ),
        (
            "environments=[{name: a, environment: tools, data: {source: [{path: a, wieght: 1}]}}]",
            "environments.0.data.source.0.wieght: unknown key; did you mean 'weight'? (--set",
        ),
        (
            "generator.mcp_servers=[{command: [a], environment: {Level: 1}}]",
            "generator.mcp_servers.0.environment.Level: was 1; input should be a valid string",
        ),
        (
            "learner.gradient_checkpointing=-1",
            "learner.gradient_checkpointing: was -1; input should be a valid boolean, or greater",
        ),
        ("learner.profiler.steps=3", "learner.profiler.steps: was 3; input should be a list"),
        (
            "run.resume=null",
            "run.resume: was None; input should be 'never' or 'auto', or a path (--set",
        ),
        ("data.source=!path x", "--set data.source: '!path x' is not YAML: line 1: could not det"),
        (
            f"buffer.max_staleness={{min: 0, max: {2**31}}}",
            f"buffer.max_staleness.max: was {2**31}; it must be at most",
        ),
        ("data.truncation=middle", "data.truncation: was 'middle'; input should be 'error',"),
        ("weights.address=here", "weights.address: was 'here'; it must be tcp://host:port"),
        (
            "weights.address=tcp://0.0.0.0:5",
            "weights.address: was 'tcp://0.0.0.0:5'; name the address at which generators reach",
        ),
        ("buffer.url=zmq://*:5", "buffer.url: was 'zmq://*:5'; it must look like zmq://host:port"),
        ("run.name=../up", "run.name: was '../up'"),
        ("run", "--set run: must look like section.key=value"),
        ("run.name.first=x", "--set run.name.first: name is 'default' and has no keys below it"),
        ("data.source_kwargs=[1", "--set data.source_kwargs: '[1' is not YAML"),
        ("learner.dtype=fp16", "or 'float16'; verl's fp16 is float16 here"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path, override, sentence):
    text = MINIMAL + "run: {name: default}\n"
    assert sentence in refusal(tmp_path, text, override)


@pytest.mark.parametrize(
    "text", ["1e5", "7e10", "+1e5", "0o17", "1.5e3", "on", "12:30", "~", "1_0"]
)
def test_a_text_that_looks_like_something_else_stays_a_text(tmp_path, text):
    named = f'data.source_kwargs={{a: "{text}", "{text}": [1, "{text}"]}}'
    config = load(tmp_path, MINIMAL, f'tracking.project="{text}"', named)
    assert config.data.source_kwargs == {"a": text, text: [1, text]}
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "resolved.yaml", environment={}).config == config


def test_a_path_begins_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load(tmp_path, MINIMAL, "run.folder=~/runs", "data.source=[~/a.jsonl, {path: ~/b}]")
    paths = [config.run.folder, *(Path(source.path) for source in config.data.sources)]
    assert paths == [Path("/home/me") / name for name in ("runs", "a.jsonl", "b")]


def test_a_path_with_an_at_sign_is_named_whole(tmp_path):
    folder = tmp_path / "me@home"
    folder.mkdir()
    assert f"run.speed: unknown key; did you mean 'seed'? ({folder}/run.yaml:" in refusal(
        folder, MINIMAL + "run: {speed: 3}\n"
    )


def test_a_wrong_setting_is_refused_with_its_place(tmp_path):
    assert f"({tmp_path}/run.yaml:3)" in refusal(tmp_path, MINIMAL + "run: {speed: 3}\n")
    told = refusal(tmp_path, MINIMAL, STREAMRL__RUN__SPEED="3")
    assert told == "run.speed: unknown key; did you mean 'seed'? (environment STREAMRL__RUN__SPEED)"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ["learner.max_tokens_per_micro_batch=100"],
            [
                "learner.max_tokens_per_micro_batch",
                "data.max_prompt_length",
                "generator.max_new_tokens",
            ],
        ),
        (["generator.max_model_len=100"], ["generator.max_model_len", "data.max_prompt_length"]),
        (
            ["generator.min_new_tokens=300"],
            ["generator.min_new_tokens", "generator.max_new_tokens"],
        ),
        (["generator.temperature=0"], ["generator.temperature", "generator.group_size"]),
        (
            ["weights.publish_every=4", "buffer.max_staleness=2"],
            ["weights.publish_every", "buffer.max_staleness"],
        ),
        (["weights.backend=nccl", "learner.device=cpu"], ["weights.backend", "learner.device"]),
        (
            [
                *("weights.store=file:///store", "weights.transport=store"),
                *("generator.engine=vllm", "generator.vllm.url=http://127.0.0.1:1"),
            ],
            ["weights.transport store", "generator.vllm.url"],
        ),
        (
            ["weights.backend=shared", "learner.device=cuda", "generator.device=cpu"],
            ["weights.backend shared", "learner.device", "generator.device"],
        ),
        (
            ["learner.optimizer.warmup_steps=101"],
            ["learner.optimizer.warmup_steps", "run.max_steps"],
        ),
        (
            ["algorithm.value.critic_warmup=5"],
            ["algorithm.value.critic_warmup", "algorithm.advantage is opob"],
        ),
        (
            ["algorithm.advantage=gae", "algorithm.value.critic_warmup=100"],
            ["algorithm.value.critic_warmup", "run.max_steps"],
        ),
        (
            ["algorithm.reward.length={max_length: 4096, buffer: 512}"],
            ["algorithm.reward.length", "max_length 4096", "generator.max_new_tokens 256"],
        ),
        (["generator.group_size=1"], ["algorithm.advantage opob", "generator.group_size"]),
        (
            ["algorithm.loss=loss.py:own", "algorithm.loss_config={divergence_topk: 4}"],
            ["algorithm.loss_config.divergence_topk 4", "algorithm.proximal recompute"],
        ),
        (
            ["generator.group_size=4090", "generator.oversample.num_siblings=7"],
            ["group_size 4090", "generator.oversample.num_siblings 7", "at most 4096"],
        ),
        (
            ["generator.episode.max_turns=3"],
            ["generator.episode.max_turns 3", "generator.environment single_turn"],
        ),
        (
            ["generator.episode.turn_deadline_s=60", "generator.group_deadline_s=60"],
            ["generator.episode.turn_deadline_s 60", "generator.group_deadline_s 60"],
        ),
        (
            ["generator.episode.turn_deadline_s=60", "generator.environment=agent"],
            ["generator.episode.turn_deadline_s 60", "agents take turns at their own pace"],
        ),
        (
            ["generator.episode.max_in_flight=7"],
            ["generator.episode.max_in_flight 7", "group_size 8"],
        ),
        (
            ["generator.episode.truncated=drop", "algorithm.reward.truncated=mask"],
            ["generator.episode.truncated drop", "algorithm.reward.truncated mask"],
        ),
        (
            ["buffer.max_staleness={min: 1, max: 4}", "algorithm.rollout_is=off"],
            ["buffer.max_staleness", "algorithm.rollout_is.threshold null"],
        ),
        (
            [
                "buffer.max_staleness={min: 1, max: 4}",
                "algorithm.rollout_is={threshold: null, rejection: [{seq_mean_k3: 0.1}]}",
            ],
            ["buffer.max_staleness", "algorithm.rollout_is.threshold null"],
        ),
    ],
)
def test_a_contradiction_names_both_settings(tmp_path, overrides, names):
    told = refusal(tmp_path, MINIMAL, *overrides)
    assert all(name in told for name in names)


@pytest.mark.parametrize(
    ("value", "sentences"),
    [
        ("{min: 3, max: 1}", ["buffer.max_staleness: was min 3 and max 1; min must be at most"]),
        ("{min: 0, max: 4, ess: 1}", ["buffer.max_staleness.ess: was 1; input should be less"]),
        (
            "{mn: 0, max: 4}",
            [
                "buffer.max_staleness.mn: unknown key; did you mean 'min'?",
                "buffer.max_staleness.min: is required",
            ],
        ),
        ("few", ["buffer.max_staleness: was 'few'; input should be a valid integer"]),
    ],
)
def test_a_range_of_staleness_that_is_none_is_refused(tmp_path, value, sentences):
    told = refusal(tmp_path, MINIMAL, f"buffer.max_staleness={value}")
    assert all(sentence in told for sentence in sentences), told


def test_a_range_of_staleness_is_read_from_one_value_or_from_its_parts(tmp_path):
    whole = load(tmp_path, MINIMAL, "buffer.max_staleness={min: 1, max: 4}").buffer
    parts = ("buffer.max_staleness.min=1", "buffer.max_staleness.max=4")
    assert load(tmp_path, MINIMAL, *parts).buffer.max_staleness == whole.max_staleness
    assert (whole.smallest_staleness, whole.largest_staleness) == (1, 4)
    # Weights are published more often while the bound is low.
    load(tmp_path, MINIMAL, *parts, "weights.publish_every=5")
    assert "would deadlock" in refusal(tmp_path, MINIMAL, *parts, "weights.publish_every=6")


def test_faults_of_one_section_are_told_at_once(tmp_path):
    told = refusal(tmp_path, MINIMAL, "buffer.lease_ttl_s=0.5", "buffer.url=http://host:1")
    assert "buffer.lease_ttl_s: was 0.5" in told
    assert "buffer.url: was 'http://host:1'" in told


def test_publishing_as_rarely_as_the_staleness_allows_is_accepted(tmp_path):
    load(tmp_path, MINIMAL, "weights.publish_every=3", "buffer.max_staleness=2")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n", "must hold sections"),
        (
            "run: {name: a\nmodel: 3\n",
            "is not YAML: line 2: expected ',' or '}', but got ':' (while parsing a flow mapping, "
            "which begins in line 1)",
        ),
        ("run:\n\tname: x\n", "line 2: found character '\\t' that cannot start any token"),
        ("run: {seed: 1, seed: 2}\n", "run.seed: stands twice, the second time at"),
        ("environments: [{name: a, name: b}]\n", "is not YAML: line 1: 'name' stands twice"),
        ("run: {folder: a/$NAME}\n", "run.folder: was 'a/$NAME'; nothing is filled in for $"),
        ("run: {name: 42}\n", "run.name: was 42; input should be a valid string; in quotes"),
        ("run: {<<: {seed: 1}}\n", "run.yaml:1: YAML 1.2 merges no mappings by <<: write"),
        ("data: &d {source_kwargs: *d}\n", "is not YAML: line 1: the alias stands inside of what"),
        ("run: {name: {{ host }}}\n", """run.name: was {"{'host': None}": None}; input should"""),
        ("run: {name: !host x}\n", "is not YAML: line 1: could not determine a constructor for"),
        (
            "learner.optimizer.lr: 1e-6\n",
            "unknown key; a file has it section by section: learner: {optimizer: {lr: ...}}",
        ),
        ("", "model: is required and was not given"),
        ("model: {}\ndata: {source: x}\n", "model.path: is required and was not given"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, sentence):
    assert sentence in refusal(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_section_cannot_be_changed(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).run.seed = 3


ROOT = Path(__file__).parents[3]
SHIPPED = [
    path
    for folder in ("configs", "deploy/configs")
    for path in (ROOT / folder).rglob("*.yaml")
    if not path.name.endswith(".variants.yaml")
]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_loads(path):
    load_config(path, environment={})
