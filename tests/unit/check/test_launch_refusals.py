"""What a daemon would refuse before its first step, `streamrl check` says first: by the setting's
name, with what is allowed."""

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from actors.make_model import make_tokenizer
from streamrl.cli.main import main
from streamrl.config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.run_folder import prepare
from tests.documents import ROOT
from tests.unit.check.test_check import (
    folder,  # noqa: F401
    make_model_folder,
    report,
    without_gpus,  # noqa: F401
)

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
TWO = "learner.num_ranks=2"
MADE = ("model.path=made", "model.recipe.num_layers=1")
"""A model that a launch makes."""
MODELS: Mapping[str, Mapping[str, object]] = {
    "model": SIZES,
    "recurrent": {**SIZES, "layer_types": ["full_attention", "linear_attention"]},
    "dynamic": {
        **SIZES,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 20,
    },
    "zamba": {"model_type": "zamba2"},
    "mamba": {"model_type": "mamba"},
    "sees": {**SIZES, "model_type": "qwen2_vl"},
}
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)

COMPILED = r"learner\.compile: was true, and layers of {} carry a state from token to token"

REFUSED: Sequence[tuple[Sequence[str], str]] = [
    (["generator.engine_kwargs={dtype: float16}"], r"generator\.engine_kwargs\.dtype: is set by"),
    (
        ["learner.lora={}", "learner.mesh={tensor: 2}", TWO],
        r"learner\.mesh\.tensor: was 2, and the matrices of learner\.lora are not divided",
    ),
    (["learner.profiler={memory: true}"], r"learner\.profiler\.memory: was true, .* needs a GPU"),
    (
        ["learner.mesh={sequence: 3}", "learner.num_ranks=3"],
        r"learner\.mesh\.sequence: was 3, which does not divide the 4 attention heads of llama",
    ),
    (
        ["learner.mesh={tensor: 4}", "learner.num_ranks=4"],
        r"learner\.mesh\.tensor: was 4, which does not divide the 2 key-value heads of llama",
    ),
    (
        ["learner.mesh={sequence: 2}", TWO, "model.path=recurrent"],
        r"learner\.mesh\.sequence: was 2, .* no attention \(linear_attention\): set it to 1",
    ),
    (
        ["learner.mesh={sequence: 2}", TWO, "model.path=mamba"],
        r"learner\.mesh\.sequence: was 2, .* no attention \(recurrent ones\): set it to 1",
    ),
    (
        ["learner.mesh={sequence: 2}", TWO, "model.path=sees"],
        r"learner\.mesh\.sequence: was 2; it must be 1 for a model that sees images",
    ),
    (["learner.compile=true", "model.path=recurrent"], COMPILED.format("llama")),
    (
        ["learner.compile=true", "model.path=mamba"],
        COMPILED.format("mamba"),
    ),
    (["model.path=dynamic"], r"generator\.max_model_len: was 32, .* hf is exact up to 20 tokens"),
    (["model.path=zamba"], r"generator\.engine: hf cannot decode zamba2, .*: use vllm"),
    (
        ["model.path=sees", "generator.hf={recompute_kv: true}"],
        r"generator\.hf\.recompute_kv: was true, and the model at sees sees images",
    ),
    (["model.path=cut"], r"model\.path: .* damaged: model\.safetensors has 69 bytes of 81"),
    (
        ["algorithm.distillation={teachers: [{path: tutor}]}", "algorithm.rollout_is=token_is"],
        r"algorithm\.distillation\.teachers\.0\.path: there is no folder tutor",
    ),
    (
        ["algorithm.distillation={teachers: [{path: cut}]}", "algorithm.rollout_is=token_is"],
        r"algorithm\.distillation\.teachers\.0\.path: the weights of cut are damaged",
    ),
    (["model.path=list"], r"model\.path: .* damaged: model\.safetensors has no header"),
    (["model.path=lost"], r"model\.path: .* damaged: a\.safetensors is missing"),
    (
        ["model.path=chats", "data.source=image.jsonl", "data.image_key=image"],
        r"data\.source: image\.jsonl has images, which the model at model\.path .* does not see",
    ),
    (
        ["model.path=chats", "data.source=rows.jsonl", "data.max_prompt_length=8"],
        r"data\.max_prompt_length 8: line \d+ of rows\.jsonl has \d+ tokens .* would take it",
    ),
    (
        ["model.path=chats", "data.source=rows.jsonl", "data.system_prompt=c"],
        r"data\.chat_template: it cannot render .*System role not supported",
    ),
    (
        ["generator.environment=agent"],
        r"data\.chat_template: was native, and environment agent talks by messages",
    ),
    (["data.source=chat.jsonl", *MADE], r"data\.chat_template: was native, and prompts are lists"),
    (
        ["data.source=rows.jsonl", "data.truncation=filter", "data.max_prompt_length=2"],
        r"data\.max_prompt_length: was 2; none of the first 10 prompts fits, the shortest has 3",
    ),
    (
        [
            *("model.path=chats", "generator.environment=agent", "data.max_prompt_length=40"),
            "generator.agent.token_env=NO_SUCH_TOKEN",
        ],
        r"generator\.agent\.token_env: there is no NO_SUCH_TOKEN",
    ),
]
CHATS = ("model.path=chats", "data.source=rows.jsonl", "data.max_prompt_length=40")

WARNED: Sequence[tuple[Sequence[str], str]] = [
    (
        ["generator.environment=frozen_lake", "data.reward=environment", *CHATS],
        r"generator\.max_model_len: is not set, and leaves 56 tokens, .* of frozen_lake ends",
    ),
    (
        ["tracking.prometheus={enabled: true, host: 192.0.2.1}"],
        r"tracking\.prometheus\.host: .*cannot listen at .*192\.0\.2\.1.* here: ",
    ),
    (
        ["model.path=whole", "learner.lora={targets: [q_porj]}"],
        r"learner\.lora\.targets: was 'q_porj', .* did you mean 'q_proj'",
    ),
    (
        ["model.path=whole", 'learner.optimizer.groups=[{parameters: "*.mlp", lr: 0.1}]'],
        r"learner\.optimizer\.groups\.0\.parameters: was '\*\.mlp', which no tensor of .* matches",
    ),
]
"""What may be refused: an address of another host of the run, names that transformers changes."""


def safetensors(names: Sequence[str], num_bytes: int) -> bytes:
    tensor = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    header = json.dumps(dict.fromkeys(names, tensor), separators=(",", ":")).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


@pytest.fixture
def models(folder: Path) -> Path:  # noqa: F811
    for name, facts in MODELS.items():
        if name != "model":
            make_model_folder(folder / name, **facts)
    (folder / "model" / "config.json").write_text(
        json.dumps(json.loads((folder / "model/config.json").read_text()) | SIZES)
    )
    for name, tensor in (("cut", "a"), ("lost", "a"), ("whole", "model.layers.0.q_proj.weight")):
        make_model_folder(folder / name)
        content = safetensors([tensor], 4 if name == "cut" else 16)
        (folder / name / "model.safetensors").write_bytes(content)
    make_model_folder(folder / "list")
    (folder / "list" / "model.safetensors").write_bytes(struct.pack("<Q", 3) + b"[1]")
    index = {"weight_map": {"a": "a.safetensors"}}
    (folder / "lost" / "model.safetensors.index.json").write_text(json.dumps(index))
    make_model_folder(folder / "chats", vocab_size=200)
    tokenizer = make_tokenizer("0123456789c=<>abcdefghijklmnopqrstuvwxyz ")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.chat_template = STRICT
    tokenizer.save_pretrained(folder / "chats")
    image = {"prompt": "<image>c1=", "answer": "1", "image": ["image.png"]}
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "image.jsonl").write_text(json.dumps(image) + "\n")
    return folder


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED, ids=[o[-1] for o, _ in REFUSED])
def test_check_refuses_what_a_daemon_would(models: Path, overrides: Sequence[str], sentence: str):
    problems = report(models, *overrides).problems
    assert len(problems) == 1, problems
    assert re.search(sentence, problems[0])


@pytest.mark.parametrize(("longest", "is_loaded"), [(40, False), (24, True)])
def test_transformers_is_imported_only_for_prompts_that_a_template_may_make_too_long(
    models: Path, monkeypatch: pytest.MonkeyPatch, longest: int, is_loaded: bool
):
    """Here it makes 20 tokens of 3."""
    loads: list[RunConfig] = []
    monkeypatch.setattr("streamrl.cli.check.data._renderer", loads.append)
    assert not report(models, *CHATS, f"data.max_prompt_length={longest}").problems
    assert bool(loads) is is_loaded


@pytest.mark.parametrize(("overrides", "sentence"), WARNED, ids=[o[-1] for o, _ in WARNED])
def test_check_warns_of_what_a_daemon_may_refuse(
    models: Path, overrides: Sequence[str], sentence: str
):
    found = report(models, *overrides)
    assert not found.problems
    assert any(re.search(sentence, warning) for warning in found.warnings), found.warnings


@pytest.mark.usefixtures("torch_is_known")
def test_a_folder_that_holds_a_run_is_said_with_what_a_launch_needs(
    models: Path, capsys: pytest.CaptureFixture[str]
):
    (models / "run").mkdir()
    (models / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    main(["check", "run.yaml", "--quiet"])
    assert "holds a run already: --resume goes on with it, --new moves" in capsys.readouterr().out
    assert not [w for w in report(models).warnings if "holds a run" in w], "a launch has its flags"
    with pytest.raises(ConfigError, match="holds a run already: --resume goes on with it, --new"):
        prepare(load_config("run.yaml").config, resume=False, new=False, next_prompt_index=len)


def test_compiled_layers_need_a_compiler(models: Path, monkeypatch: pytest.MonkeyPatch):
    assert not report(models, "learner.compile=true").problems
    monkeypatch.setenv("PATH", "")
    (problem,) = report(models, "learner.compile=true").problems
    assert problem.startswith("learner.compile: was true, and torch.compile needs a C++ compiler")
    assert not report(models).problems


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["learner.device=cpu"], r"learner\.device is cpu, not a GPU; auto takes what can be used"),
        (["model.path=mamba"], "its kernels are not known to compute mamba as transformers does"),
        (["learner.mesh={tensor: 2}", TWO], r"learner\.mesh\.tensor is 2: .* whole matrices; auto"),
    ],
)
def test_layers_without_kernels_of_liger_are_said(
    models: Path, overrides: Sequence[str], reason: str
):
    problems = report(models, "learner.liger_layers=true", *overrides).problems
    assert any(re.search(f"learner.liger_layers: was true, and {reason}", p) for p in problems)


def test_a_version_of_flash_attention_needs_its_module(models: Path):
    (problem,) = report(models, "learner.flash_attention=4").problems
    assert problem.startswith("learner.flash_attention: was 4, and there is no module flash_attn.c")


SAID: Mapping[str, str] = {
    "check calls what raises": """
        actors/engines/__init__ actors/environments/__init__
        actors/prompts/__init__ actors/prompts/order actors/prompts/rows actors/prompts/tasks
        actors/rendering/chat_template actors/rendering/parsing actors/rendering/renderer
        actors/rewards/__init__ actors/rewards/remote/http
        actors/rewards/remote/judge actors/rewards/reward_model actors/sandbox/sandbox
        actors/tools/builtin actors/tools/functions actors/tools/toolset
        buffers/redis/connection buffers/redis/memory_limit buffers/redis/topology
    """,
    "check looks at the same itself: `REFUSED`, and the traps of test_check.py": """
        actors/daemon actors/gateway/server actors/make_model
        actors/prompts/fitting learners/optimizer learners/policy/attention learners/policy/loading
        learners/policy/lora learners/policy/sharding learners/profiling
        learners/checkpoints/restore
    """,
}
LATER: Mapping[str, str] = {
    "of a command, or of a daemon that is started by hand": """
        actors/evaluation actors/parity actors/validation buffers/daemon
        learners/checkpoints/export learners/executor/place learners/replay
    """,
    "what an engine, its server or vLLM's platform says of its arguments": """
        actors/engines/hf/engine actors/engines/served/open actors/engines/sglang/server
        actors/engines/vllm/arguments actors/engines/vllm/cpu actors/engines/vllm/engine
        actors/engines/vllm/server actors/rewards/remote/teachers
    """,
    "needs the model itself: what it computes, its class, the weights of a checkpoint": """
        actors/engines/hf/cache actors/engines/model learners/checkpoints/contents
        learners/policy/decoder
        learners/policy/packing_check learners/policy/router_replay
        learners/policy/sequence_parallel
    """,
    "what other processes or an earlier run left, or send": """
        buffers/journal/journal buffers/journal/sqlite buffers/ledger/ledger buffers/messages
        learners/batch/packing learners/batch/training_batch learners/objective/targets
        learners/policy/teachers learners/session learners/step_record
    """,
}


def test_each_refusal_of_a_daemon_is_said_by_check_or_cannot_be():
    """A module that begins to refuse is put into one of the two tables, with a case or a reason."""
    raises = re.compile(r"raise (ConfigError|missing|not_installed)\(")
    found = {
        str(path.relative_to(ROOT).with_suffix(""))
        for package in ("actors", "learners", "buffers")
        for path in (ROOT / package).rglob("*.py")
        if raises.search(path.read_text(encoding="utf-8"))
    }
    listed = [name for names in (*SAID.values(), *LATER.values()) for name in names.split()]
    assert sorted(listed) == sorted(found)
