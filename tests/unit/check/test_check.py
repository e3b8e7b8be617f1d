"""`streamrl check` refuses what cannot start, by the setting's name, without starting anything."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from streamrl import wire
from streamrl.checkpoints.find import require_steps_to_launch
from streamrl.checkpoints.history import write_history
from streamrl.cli.check import command, model
from streamrl.cli.check.command import refusals, run_findings
from streamrl.cli.check.machine import Machine
from streamrl.cli.main import main
from streamrl.config import LoadedConfig, load_config, to_yaml
from streamrl.config.loading.load import load_usable
from streamrl.errors import ConfigError, DamagedCheckpointError
from streamrl.findings import Severity
from streamrl.placement import hosts
from streamrl.types import Books, FinishReason, Trajectory, TrajectoryGroup, replace
from streamrl.types.packed import PackedGroup, pack
from tests.checkpoints import HISTORY, write_checkpoint
from tests.ports import free_port

CONFIG = """
run: {{name: run, folder: {folder}, max_steps: 2, evaluate: false}}
model: {{path: {folder}/model}}
data: {{source: copy, max_prompt_length: 16}}
generator: {{max_new_tokens: 16}}
buffer: {{url: "zmq://127.0.0.1:0"}}
weights: {{address: "tcp://127.0.0.1:0"}}
"""
ALPHABET = "0123456789c="


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a model's files, rows, and code of a user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    make_model_folder(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    rows = [{"prompt": f"c{i}=", "answer": str(i)} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = [{"prompt": [{"role": "user", "content": "c1="}], "answer": "1"}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    known = [{**row, "data_source": "math"} for row in rows]
    (tmp_path / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in known))
    (tmp_path / "words.jsonl").write_text('{"prompt": "is it so?", "answer": "yes"}\n')
    empty = [{"prompt": "is it so?", "answer": answer} for answer in ("yes", " ", "no", "")]
    (tmp_path / "empty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in empty))
    tests = [{"prompt": f"c{i}=", "answer": "42", "test": "x = 1"} for i in range(3)]
    (tmp_path / "tests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tests))
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("def score(:\n")
    return tmp_path


OWN = """
def score(episode):
    return 1.0

def score_without_arguments():
    return 1.0

class Plain:
    def start(self, context):
        return context.prompt_token_ids
    def step(self, completion):
        return None

class OneMethod:
    async def start(self, context):
        return context.prompt_token_ids

class Needs:
    def __init__(self, difficulty):
        pass
"""


def make_model_folder(folder: Path, **config: object) -> None:
    folder.mkdir()
    tokens = {token: number for number, token in enumerate(["</s>", *ALPHABET])}
    facts = {
        "model_type": "llama",
        "vocab_size": len(tokens),
        "max_position_embeddings": 64,
        "eos_token_id": 0,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    characters = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**characters, "invert": False},
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "</s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


@pytest.mark.parametrize("targets", ["all-linear", "[up_proj]"])
def test_an_adapter_on_experts_is_foreseen(folder: Path, targets: str):
    names = ("self_attn.q_proj", "mlp.experts.0.up_proj")
    weights = {f"model.layers.0.{name}.weight": np.zeros((2, 2)) for name in names}
    save_file(weights, folder / "model" / "model.safetensors")
    warnings = report(folder, f"learner.lora={{targets: {targets}}}").warnings
    (sentence,) = (warning for warning in warnings if "lora" in warning)
    assert "names the experts" in sentence
    assert sentence.endswith("name other layers, such as [q_proj]")


def test_a_checkpoint_that_was_taken_once_may_be_gone(folder: Path):
    """`learner.checkpoint.keep` deletes it in time, and run.resume stays in the run's settings."""
    named = folder / "run" / "checkpoints" / "step-00000001"
    config = load_config(folder / "run.yaml", [f"run.resume={named}"]).config
    write_checkpoint(config.run.path, 2, Books())
    write_history(named.parent, replace(HISTORY, base=str(named), resume=str(named)))
    found = report(folder, f"run.resume={named}")
    assert found.problems == ()
    assert any("run has gone on from" in warning for warning in found.warnings)
    (config.run.path / "config.yaml").write_text(to_yaml(config))
    assert examine(*load_usable(config.run.path / "config.yaml", (), {})).warnings == ()
    require_steps_to_launch(config, resume=True, new=False)
    with pytest.raises(DamagedCheckpointError, match="step-00000001"):
        require_steps_to_launch(config, resume=False, new=True)
    older = named.with_name("step-00000000")
    (problem,) = report(folder, f"run.resume={older}").problems
    assert "step-00000000 is no checkpoint" in problem


class CheckReport(NamedTuple):
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    facts: tuple[str, ...]


def examine(loaded: LoadedConfig, refused: ConfigError | None) -> CheckReport:
    """Sentences: what keeps a run from starting, what else is not in order, what is."""
    found = run_findings(loaded, refused)
    problems = refusals(found)
    sentences = [(str(finding), finding.severity is Severity.OK) for finding in found]
    warnings = (text for text, is_ok in sentences if not is_ok and text not in problems)
    return CheckReport(
        tuple(problems), tuple(warnings), tuple(text for text, is_ok in sentences if is_ok)
    )


def report(folder: Path, *overrides: str) -> CheckReport:
    loaded, refused = load_usable(folder / "run.yaml", overrides, {})
    return examine(loaded, refused)


def test_a_run_that_can_start_has_no_problem(folder):
    found = report(folder)
    assert (found.problems, found.warnings) == ((), ())
    assert [fact.partition(":")[0] for fact in found.facts] == [
        *("model.path", "model.path", "data.source", "data.reward", "generator.engine"),
        *(
            "learner.device",
            "run.folder",
            "buffer.url",
            "buffer.max_group_bytes",
        ),
    ]


HOST_OF_NOBODY = "http://127.0.0.1:9"
TRAPS = [
    (["model.path=/nowhere"], r"model\.path: there is no folder /nowhere; give a Hug"),
    (["model.path=./modle"], r"model\.path: there is no folder \./modle; did you mean 'model'\?"),
    (["model.path=run.yaml"], r"model\.path: run\.yaml is a file"),
    (["model.path=."], r"model\.path: \. has no config\.json"),
    (["model.tokenizer=/nowhere"], r"model\.tokenizer: there is no folder /nowhere"),
    (["generator.max_new_tokens=100"], r"generator\.max_new_tokens 100 is longer .* which is 64"),
    (["generator.max_model_len=99"], r"generator\.max_model_len: 99 is longer .* which is 64"),
    (["generator.stop_token_ids=[13]"], r"generator\.stop_token_ids: has 13.*tokens below 13"),
    (["data.source=nowhere.jsonl"], r"data\.source: cannot read nowhere\.jsonl: No such file"),
    (["data.source=row.jsonl"], r"row\.jsonl: No such file.*; did you mean 'rows\.jsonl'\?"),
    (["data.reward=won.py:score"], r"no file won\.py; did you mean 'own\.py'\?"),
    (["data.source=cpoy"], r"data\.source: was 'cpoy'.*did you mean 'copy'"),
    (["data.source=rows.jsonl", "data.prompt_key=promt"], r"data\.prompt_key: .*mean 'prompt'"),
    (["data.source_kwargs={min_length: 9}"], r"data\.source_kwargs: copy with .*ValueError"),
    (
        ["data.source=rows.jsonl", "run.evaluate=true"],
        r"data\.eval_source: is needed to evaluate, since data\.source rows\.jsonl holds no",
    ),
    (
        ["data.source=rows.jsonl", "run.evaluate=true", "data.eval_source=no.jsonl"],
        r"data\.\w*source: cannot read no\.jsonl",
    ),
    (
        ["data.source=environment"],
        r"data\.reward: exact_match cannot score .*; the reward environment is what the env",
    ),
    (["data.source=chat.jsonl"], r"data\.chat_template: was native.*no chat template"),
    (
        ["data.source=rows.jsonl", "data.max_prompt_length=2"],
        r"data\.max_prompt_length: was 2, and a prompt has 3 tokens \(.*rows\.jsonl",
    ),
    (
        ["data.source=words.jsonl", "data.reward=numeric_answer", "data.truncation=drop"],
        r"data\.reward: numeric_answer cannot score the first row of .* was 'yes'; num",
    ),
    (
        ["data.source=tests.jsonl", "data.rewards=[{reward: code}]"],
        r"data\.rewards\.0: code cannot score 3 of the first 3 rows .*: test was 'x = 1': it runs",
    ),
    (
        [
            "data.source=rows.jsonl",
            "run.evaluate=true",
            "data.eval_source=words.jsonl",
            "data.rewards=[{reward: exact_match, data_source: [math]}, {reward: numeric_answer}]",
        ],
        r"data\.rewards\.1: numeric_answer cannot score the first row of data\.eval_source; .*yes",
    ),
    (["data.source=own.py:Prompts"], r"data\.source: own\.py has no function 'Prompts'"),
    (["data.source=reasoning_gym:chain_smu"], r"data\.source: .*did you mean 'chain_sum'"),
    (["data.chat_template=no.jinja"], r"data\.chat_template: cannot read no\.jinja: No such file"),
    (["data.reward=own.py:scroe"], r"data\.reward: own\.py has no function 'scroe'; did.*'score'"),
    (["data.reward=broken.py:score"], r"data\.reward: broken\.py: SyntaxError"),
    (["data.reward=exact_macth"], r"data\.reward: was 'exact_macth'.*did you mean 'exact_match'"),
    (["data.reward=own.py:score_without_arguments"], r"data\.reward: .*takes \(\).*too many"),
    (["data.reward=own.py:score", "data.reward_kwargs={bonus: 1}"], r"data\.reward: .*'bonus'"),
    (["data.reward=regex", "data.reward_kwargs={pattern: '('}"], r"data\.reward_kwargs: pattern"),
    (["data.reward=task"], r"data\.reward: task is the scorer of reasoning_gym"),
    (["generator.environment=singel_turn"], r"generator\.environment: .*mean 'single_turn'"),
    (["generator.environment=own.py:Plain"], r"generator\.environment: .*start is not `async def`"),
    (["generator.environment=own.py:OneMethod"], r"generator\.environment: .*no method 'step'"),
    (["generator.environment=own.py:Needs"], r"generator\.environment_kwargs: own.py:Needs needs"),
    (["generator.engine=vlm"], r"generator\.engine: was 'vlm'; did you mean 'vllm'"),
    (["algorithm.loss=own.py:loss"], r"algorithm\.loss: own\.py has no function 'loss'"),
    (["algorithm.advantage=no.py:f"], r"algorithm\.advantage: there is no file no\.py"),
    (["run.folder=run.yaml"], r"run\.folder: .* cannot be made: .*run\.yaml is a file"),
    (["run.folder=/proc/nowhere"], r"run\.folder: .*/proc cannot be written"),
    (["run.resume=model"], r"run\.resume: model is no checkpoint .*; name never, auto or the path"),
    (["learner.checkpoint.every=-1"], r"every: was -1; .*above run\.max_steps the last"),
    ([f"buffer.url=zmq://127.0.0.1:{'9' * 5000}"], r"buffer\.url: .*a number from 0 to 65535"),
    (["weights.address=tcp://127.0.0.1:70000"], r"weights\.address: .*a number from 0 to 65535"),
    (["buffer.url=zmq://0.0.0.0:29610"], r"buffer\.url: .*needs keys.*buffer\.curve"),
    (["weights.address=tcp://10.0.0.1:29611"], r"weights\.address: .*needs keys.*buffer\.curve"),
    (["buffer.curve=nowhere"], r"buffer\.curve: there is no folder nowhere"),
    (["buffer.max_group_bytes=10"], r"buffer\.max_group_bytes 10 refuses every group"),
    (["learner.device=cuda:7"], r"learner\.device: was 'cuda:7', and there are 0 GPUs here"),
    (["generator.device=cuda"], r"generator\.device: was 'cuda', and there are 0 GPUs here"),
    (
        [
            "generator.engine=sglang",
            f"generator.sglang.url={HOST_OF_NOBODY}",
            "generator.device=cpu",
        ],
        r"generator\.device: was 'cpu', and sglang takes the devices that it finds",
    ),
    (
        ["algorithm.reward.format_penalty=0.5"],
        r"algorithm\.reward\.format_penalty: was 0\.5, .* single_turn has no form",
    ),
    (
        ["algorithm.reward.agentic={grouping: inductive}"],
        r"algorithm\.reward\.agentic\.grouping: was 'inductive', .* batch does the same",
    ),
    (
        ["algorithm.sample_weight.difficulty=true"],
        r"algorithm\.sample_weight\.difficulty: .* has no number in a column difficulty",
    ),
    (
        ["algorithm.distillation={teachers: [{path: model}], template: '{{ prompt }} {{ hint }}'}"],
        r"algorithm\.distillation\.template: 'hint' is undefined, for ",
    ),
    (
        [
            "algorithm.distillation={teachers: [{name: a, path: model}, {name: b, path: model}], "
            "column: task}"
        ],
        r"algorithm\.distillation\.column: task of .* names teacher None; ",
    ),
    (
        ["learner.num_ranks=2", "learner.groups_per_step=1"],
        r"groups_per_step 1 is less than the 2 r",
    ),
    (["weights.backend=nccl"], r"weights\.backend: nccl needs GPUs, and there are 0 GPUs here"),
    (["learner.offload.optimizer=true"], r"learner\.offload\.optimizer: moves memory from a GPU"),
    (["buffer.url=redis://:***@127.0.0.1:1"], r"buffer\.url: .*without its password"),
    (["buffer.password_file=no.txt", "buffer.url=redis://127.0.0.1:1"], r"buffer\.password_file"),
    (
        [
            *("generator.engine=vllm", f"generator.vllm.url={HOST_OF_NOBODY}"),
            "generator.vllm.api_key_env=NO_SUCH_KEY",
        ],
        r"generator\.vllm\.api_key_env: there is no NO_SUCH_KEY",
    ),
    (
        ["generator.vllm.url=http://me:secret@127.0.0.1:9"],
        r"generator\.vllm\.url: holds a password",
    ),
    (["learner.groups_per_step=1048577"], r"learner\.groups_per_step: was 1048577; .* 1048576"),
    (["learner.optimizer.lr=1e10"], r"learner\.optimizer\.lr: was 1.*; input should be less than"),
    (
        ["learner.optimizer.lr=0.1", "learner.optimizer.weight_decay=20"],
        r"learner\.optimizer\.weight_decay: was 20 with learning rate 0.1; their product",
    ),
    (
        ["model.path=rows.jsonl/model", "model.recipe.hidden_size=64"],
        r"model\.path: rows.jsonl/model cannot be made from model.recipe: .*rows.jsonl is a file",
    ),
]


@pytest.mark.parametrize("place", ["source", "eval_source"])
def test_rows_that_no_reward_scores_are_found(folder, place):
    """All of them are a problem: every group fails, and a validator ends. Some are a warning."""
    sources = {"source": "known.jsonl", "eval_source": "known.jsonl", place: "rows.jsonl"}
    settings = [f"data.{name}={path}" for name, path in sources.items()]
    given = [*settings, "data.rewards=[{reward: exact_match, data_source: [math]}]"]
    told = report(folder, *given, "run.evaluate=true")
    sentence = rf"data\.rewards: none scores 10 of the first 10 rows of data\.{place}, such as line"
    assert [one for one in told.problems if re.search(sentence, one)]
    both = f"data.{place}=[known.jsonl, {{path: rows.jsonl, name: math}}, words.jsonl]"
    told = report(folder, *given, both, "run.evaluate=true")
    assert not [one for one in told.problems if "data.rewards" in one]
    assert [one for one in told.warnings if "none scores 1 of the first 21 rows" in one]


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "usable_devices", tuple)


@pytest.mark.parametrize(
    ("overrides", "sentence"), TRAPS, ids=[overrides[-1] for overrides, _ in TRAPS]
)
def test_what_cannot_start_is_refused_by_name(folder, overrides, sentence):
    problems = report(folder, *overrides).problems
    assert any(re.search(sentence, problem) for problem in problems), problems
    assert len(problems) == 1, problems


def test_a_run_that_cannot_start_is_refused_without_waiting_for_torch(folder, monkeypatch, capsys):
    monkeypatch.setattr(command, "machine_findings", lambda *_, **__: pytest.fail("waits"))
    assert main(["check", "run.yaml", "--set", "model.path=/nowhere"]) == 2
    assert "there is no folder /nowhere" in capsys.readouterr().err


def test_an_agents_run_needs_no_held_out_prompts(folder):
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    chosen = ("generator.environment=agent", "data.chat_template=chat.jinja")
    found = report(folder, "run.evaluate=true", "data.source=rows.jsonl", *chosen)
    assert found.problems == ()


WARNED = [
    (
        ["buffer.url=redis://127.0.0.1:1"],
        r"buffer\.url: no Redis answers at .* refused",
    ),
    (
        ["data.source=empty.jsonl", "data.reward=exact_match", "data.truncation=drop"],
        r"data\.reward: exact_match cannot score 2 of the first 4 rows of .*empty\.jsonl.*was ' ';",
    ),
    (["data.source=rows.jsonl"], r"learner\.groups_per_step: 32 is more than the 10 prompts"),
    (["buffer.max_group_bytes=1000"], r"buffer\.max_group_bytes: .*more than about 17 tokens each"),
    (["buffer.lease_ttl_s=2"], r"buffer\.lease_ttl_s: 2 s"),
    (
        [
            "generator.max_model_len=64",
            "learner.max_tokens_per_micro_batch=40",
            "generator.environment=own.py:OneMethod",
        ],
        r"learner\.max_tokens_per_micro_batch: was 40, .* trajectories of 64 tokens",
    ),
    (["buffer.url=redis://:pw@127.0.0.1:1"], r"buffer\.url: holds a password, which other users"),
    (
        ["generator.engine=vllm", f"generator.vllm.url={HOST_OF_NOBODY}"],
        r"generator\.vllm\.url: .*does not answer \(Connection refused\)",
    ),
]


@pytest.mark.parametrize(("overrides", "sentence"), WARNED, ids=[o[-1] for o, _ in WARNED])
def test_what_may_be_regretted_is_a_warning(folder, overrides, sentence):
    warnings = report(folder, *overrides).warnings
    assert any(re.search(sentence, warning) for warning in warnings), warnings


BFLOAT16 = ["learner.dtype=bfloat16", "generator.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ({"avx2"}, {"learner.dtype", "generator.dtype"}),
        ({"avx2", "avx512f", "avx512bw"}, set()),
        ({"asimd", "bf16"}, set()),
        (set(), set()),
    ],
)
def test_bfloat16_is_warned_of_where_the_cpu_lacks_it(folder, monkeypatch, flags, warned):
    here = Machine(cpu_flags=frozenset(flags))
    monkeypatch.setattr("streamrl.cli.check.settings.read_machine", lambda: here)
    assert dtypes_in(report(folder, *BFLOAT16).warnings) == warned
    assert not dtypes_in(report(folder).warnings)


def dtypes_in(warnings: Sequence[str]) -> set[str]:
    return {found[0] for text in warnings if (found := re.match(r"\w+\.dtype", text))}


def test_weights_and_biases_online_needs_a_key(folder, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    assert (
        "tracking.wandb: online needs a key" in report(folder, "tracking.wandb=online").problems[0]
    )
    (folder / "netrc").write_text("machine api.wandb.ai login user password " + 40 * "0" + "\n")
    (folder / "netrc").chmod(0o600)
    assert report(folder, "tracking.wandb=online").problems == ()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"auto_map": {"AutoModel": "own.Model"}}, "model.trust_remote_code: is false, and"),
        ({"vocab_size": 12}, "has ids up to 12, and .* knows those below 12: they do not belong"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused(folder, config, sentence):
    make_model_folder(folder / "other", **config)
    (problem,) = report(folder, "model.path=other").problems
    assert re.search(sentence, problem)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"sliding_window": 4096}, "has sliding windows, through transformers' own cache"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "has linear_attention, through"),
    ],
)
def test_a_model_that_decodes_slower_is_warned_of(folder, config, sentence):
    make_model_folder(folder / "other", **config)
    found = report(folder, "model.path=other")
    assert found.problems == ()
    assert any(sentence in warning for warning in found.warnings)


def test_a_window_that_is_not_used_is_none(folder):
    make_model_folder(folder / "other", sliding_window=4096, use_sliding_window=False)
    assert report(folder, "model.path=other").problems == ()


def test_a_tokenizer_of_another_model_is_warned_of(folder):
    make_model_folder(folder / "other", eos_token_id=3)
    (warning,) = report(folder, "model.path=other", "model.tokenizer=model").warnings
    assert "model.tokenizer: the tokenizer at model ends sequences with token 0" in warning


def test_a_model_without_weights_is_refused(folder):
    (folder / "model" / "model.safetensors").unlink()
    assert "holds no weights" in report(folder).problems[0]


def test_a_recipe_needs_every_character_of_the_prompts(folder):
    settings = ("model.path=new", "model.recipe={alphabet: '0123=', hidden_size: 30}")
    divided, lacking = report(folder, *settings).problems
    assert "model.recipe.hidden_size: was 30" in divided
    assert "model.recipe.alphabet: lacks '456789c'" in lacking


def test_rows_that_cannot_be_counted_or_read_are_named_once(folder):
    settings = ("data.source=no.jsonl", "data.source_kwargs={}", "run.total_epochs=2")
    problems = [p for p in report(folder, *settings).problems if "no.jsonl" in p]
    assert len(problems) == 1
    assert problems[0].startswith("data.source: cannot read no.jsonl")


@pytest.mark.parametrize("settings", [("data.source=environment",), ("data.answer_key=null",)])
def test_a_recipe_needs_prompts_with_answers_to_teach(folder, settings):
    rows = '{"prompt": "1?"}\n{"prompt": "2?"}\n'
    (folder / "rows.jsonl").write_text(rows)
    source = ("data.source=rows.jsonl", "data.eval_source=rows.jsonl")
    settings = (*source, "data.source_kwargs={}", "data.reward=length", *settings, "model.path=new")
    said = "model.recipe.warm_start_source: prompts without a text or an answer"
    assert any(said in p for p in report(folder, *settings, "model.recipe={}").problems)
    for recipe in ("{warm_start_steps: 0}", "{warm_start_source: copy}"):
        problems = report(folder, *settings, f"model.recipe={recipe}").problems
        assert not any(said in p for p in problems)


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Hub that knows the model org/known, and org/gated for who has the token hf_mine."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            is_mine = self.headers.get("Authorization") == "Bearer hf_mine"
            allowed = ("/org/known/", "/org/gated/") if is_mine else "/org/known/"
            self.send_response(200 if self.path.startswith(allowed) else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(model, "HUB_S", 20.0)
    yield "hub"
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_is_asked_for(folder, hub, monkeypatch):
    found = report(folder, "model.path=org/known")
    assert found.problems == ()
    assert "the daemons will download it" in found.warnings[0]
    assert "no such model that may be read" in report(folder, "model.path=org/other").problems[0]
    assert "no such model that may be read" in report(folder, "model.path=org/gated").problems[0]
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert report(folder, "model.path=org/gated").problems == ()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids" in report(folder, "model.path=org/known").problems[0]
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert "cannot be reached" in report(folder, "model.path=org/known").problems[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_position_embeddings", "64"),
        ("vocab_size", [64]),
        ("num_attention_heads", True),
        ("intermediate_size", {"up": 8}),
        ("layer_types", "attention"),
        ("rope_scaling", {"factor": "2"}),
    ],
)
def test_a_fact_about_the_model_of_another_type_is_named(folder: Path, key: str, value: object):
    make_model_folder(folder / "other", **{key: value})
    found = report(folder, f"model.path={folder / 'other'}", "generator.stop_token_ids=[3]")
    (problem,) = (problem for problem in found.problems if "config.json" in problem)
    assert re.search(rf"model\.path: \S+/other/config\.json: Expected .* `\$\.{key}", problem)


def test_a_count_may_be_given_for_each_layer(folder: Path):
    counts = {"intermediate_size": [8, 9], "num_experts": [4, 4], "max_position_embeddings": None}
    make_model_folder(folder / "other", **counts)
    mesh = ("learner.mesh.tensor=2", "learner.num_ranks=2")
    found = report(folder, f"model.path={folder / 'other'}", *mesh)
    assert "does not divide the 9 columns of an MLP" in " ".join(found.problems)


def test_a_model_in_the_hubs_cache_is_looked_at(folder):
    repository = folder / "hub" / "models--org--cached"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    make_model_folder(repository / "snapshots" / "abc")
    found = report(folder, "model.path=org/cached", "generator.max_new_tokens=100")
    assert "is longer than the context of org/cached" in found.problems[0]
    assert "which is 64: lower one of them (" in found.problems[0]


def test_an_address_that_is_in_use_is_a_warning(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        found = report(folder, f"weights.address={address}")
    assert found.problems == ()
    assert "weights.address: " in found.warnings[0]
    assert "cannot listen at" in found.warnings[0]


def test_two_listeners_on_one_port_contradict_each_other(folder):
    settings = ("buffer.url=zmq://127.0.0.1:29610", "weights.address=tcp://localhost:29610")
    problem = report(folder, *settings).problems[0]
    assert "buffer.url zmq://127.0.0.1:29610 and weights.address tcp://localhost:29610" in problem


def test_secrets_that_others_can_read_are_warned_of(folder):
    assert main(["keys", "new", "keys"]) == 0
    assert report(folder, "buffer.curve=keys").warnings == ()
    (folder / "keys" / "client.secret").chmod(0o644)
    (warning,) = report(folder, "buffer.curve=keys").warnings
    assert "client.secret has mode 0644, so that other users can read it: chmod 600" in warning


@pytest.mark.usefixtures("torch_is_known")
def test_all_problems_are_listed_at_once_with_their_places(folder, capsys):
    settings = (
        "run.max_stepz=1",
        "buffer.url=zmq://127.0.0.1:99999",
        "generator.temperature=0",
        "data.reward=nowhere.py:score",
        "model.path=/nowhere",
        "learner.device=cuda:7",
    )
    arguments = [word for setting in settings for word in ("--set", setting)]
    assert main(["check", "run.yaml", *arguments]) == 2
    output = capsys.readouterr()
    assert "max_steps" not in output.out
    assert "  ok " not in output.out
    lines = output.err.removeprefix("streamrl check: ").splitlines()
    starts = (
        "run.max_stepz",
        "buffer.url",
        "generator.temperature 0 makes the generator.group_size",
    )
    starts += ("model.path", "data.reward", "learner.device")
    assert all(map(str.startswith, lines, starts))
    assert "(--set data.reward)" in lines[4]


@pytest.mark.usefixtures("torch_is_known")
@pytest.mark.parametrize(
    ("line", "given", "also", "never"),
    [
        # The value that stands for a model of another name is not looked at.
        ("model: {path:", "model: {name:", "data.reward: there is no file", "(not given)"),
        # A prompt length that was meant may be shorter than the default.
        ("max_prompt_length:", "max_prompt_len:", "data.reward: there is no", "cannot hold"),
        # A key may be of the server whose name is misspelled.
        ("generator: {", "generator: {vllm: {urll: 'http://a', api_key_env: K}, ",
         "data.reward: there is no file", "is of a server elsewhere"),
        ("model: {path:", "modle: {path:", "data.reward: there is no file", "(not given)"),
        ("generator: {", "generator: {grup_size: 4, episode: {max_in_flight: 4}, ",
         "data.reward: there is no file", "cannot hold one group"),
        ("generator: {", "environments: [{nam: a}]\ngenerator: {agent: {command: [a]}, ",
         "data.reward: there is no file", "no environment is agent"),
        ("buffer: {", "learner: {num_rank: 2, mesh: {tensor: 2}}\nbuffer: {",
         "data.reward: there is no file", "does not divide"),
    ],
)  # fmt: skip
def test_what_is_refused_keeps_no_other_problem_back(folder, capsys, line, given, also, never):
    text = CONFIG.format(folder=folder)
    assert line in text
    (folder / "run.yaml").write_text(text.replace(line, given))
    settings = ("data.reward=nowhere.py:score", "learner.max_tokens_per_micro_batch=100")
    assert main(["check", "run.yaml", *(word for s in settings for word in ("--set", s))]) == 2
    output = capsys.readouterr().err
    assert also in output
    assert never not in output


def test_contradictions_are_listed_beside_what_is_missing(folder):
    loaded, refused = load_usable(
        folder / "run.yaml", ["generator.temperature=0", "weights.publish_every=9"], {}
    )
    problems = examine(loaded, refused).problems
    assert [p.split()[0] for p in problems] == ["generator.temperature", "weights.publish_every"]


def test_a_smallest_group_is_as_large_as_it_is_said_to_be(folder):
    """Otherwise a limit would be refused that works, or one accepted that never does."""
    config = load_config(folder / "run.yaml", ["generator.group_size=3"], {}).config

    def num_bytes(num_tokens: int) -> int:
        trajectory = Trajectory(
            token_ids=np.zeros(num_tokens, np.int32),
            response_mask=np.arange(num_tokens) > 0,
            behavior_logprobs=np.zeros(num_tokens, np.float32),
            policy_versions=np.where(np.arange(num_tokens) > 0, 0, -1).astype(np.int32),
            reward=0.0,
            finish_reason=FinishReason.STOP,
        )
        group = TrajectoryGroup(
            group_id="0:0", prompt_index=0, environment="", trajectories=(trajectory,) * 3
        )
        data = wire.encode(pack(group))
        wire.decode(data, PackedGroup)
        return len(data)

    assert num_bytes(2) >= config.group_bytes(2)
    assert num_bytes(5000) - num_bytes(3000) == pytest.approx(config.group_bytes(2000), rel=0.01)


def test_code_of_an_algorithm_is_found_without_being_run(folder):
    (folder / "loss.py").write_text(
        "raise SystemExit('run')\nif True:\n    def loss(batch, settings): ...\nother = loss\n"
    )
    for name in ("loss", "other"):
        assert report(folder, f"algorithm.loss=loss.py:{name}").problems == ()


@pytest.mark.usefixtures("torch_is_known")
def test_what_the_users_code_prints_is_not_part_of_the_configuration(folder, capsys):
    (folder / "loud.py").write_text("print('hello')\ndef score(episode): ...\n")
    assert main(["check", "run.yaml", "--set", "data.reward=loud.py:score"]) == 0
    output = capsys.readouterr()
    assert "hello" in output.err
    assert "hello" not in output.out


@pytest.mark.usefixtures("torch_is_known")
def test_a_launch_begins_with_the_check(folder, capsys):
    text, names, said = CONFIG.format(folder=folder), [], []
    for line, trap, field in (
        ("data: {source: copy,", "data: {source: nowhere.jsonl,", "data.source"),
        ("generator: {", "generator: {engine: vlm, ", "generator.engine"),
        ("weights: {", "learner: {device: 'cuda:99'}\nweights: {", "learner.device"),
    ):
        assert line in text
        names.append(f"{field}.yaml")
        Path(names[-1]).write_text(text.replace(line, trap))
        assert main(["check", names[-1]]) == 2
        said.append(capsys.readouterr().err)
        assert said[-1].startswith(f"streamrl check: {field}")
        assert f"{names[-1]}:" in said[-1]
    # It forks, and the fork of a process with threads, as pytest may have, may hang.
    code = """
import sys
from streamrl.cli.main import main
from streamrl.cli.processes import fork_server
fork_server._can_fork = lambda: False
print([main(["launch", name]) for name in sys.argv[1:]])
"""
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "[2, 2, 2]\n"
    assert done.stderr == "".join(said).replace("streamrl check", "streamrl launch")
    assert not (folder / "run").exists()


def test_a_check_imports_nothing_heavy(folder):
    code = """
import sys
from streamrl.cli.check import packages
from streamrl.cli.main import main
packages.ask_torch = lambda: 'not asked'
assert main(["check", "run.yaml"]) == 1
print([name for name in ("torch", "transformers", "redis") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
