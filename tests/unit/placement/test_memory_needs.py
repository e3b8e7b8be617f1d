"""How much memory a plan expects, what it refuses, and how engines share a GPU."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learners.policy.lora import add_adapter
from learners.policy.network import Network
from learners.policy.sharding import checkpoint_layers
from streamrl.config import RunConfig
from streamrl.config.learner import LoraSettings
from streamrl.errors import ConfigError
from streamrl.findings import MEMORY, Severity
from streamrl.model_folder import ModelFolder
from streamrl.placement.make_plan import make_plan
from streamrl.placement.memory import (
    LearnerMemory,
    ModelShape,
    activation_bytes,
    adapter_size,
    engine_need,
)
from streamrl.placement.plan import Plan, PlannedProcess
from tests.training import make_batch
from tests.unit.placement.plans import GIB, configured, one_host, several

EIGHT_B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
"""Llama 3.1 8B."""
SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_B))
    return tmp_path


def with_model(folder: Path, **sections: Any) -> RunConfig:
    return configured(model={"path": str(folder)}, **sections)


def process(plan: Plan, name: str) -> PlannedProcess:
    return next(p for p in plan.processes if p.name == name)


def fractions(plan: Plan) -> dict[str, str]:
    return {
        p.name: p.command[p.command.index("--set") + 1].rpartition(".")[2] and p.command[-1]
        for p in plan.processes
        if "--set" in p.command
    }


def test_parameters_follow_from_config_json_as_the_model_has_them():
    config = LlamaConfig(**SMALL, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    shape = ModelShape.of_facts({**SMALL, "tie_word_embeddings": False})
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert round(ModelShape.of_facts(EIGHT_B).num_parameters / 1e9, 2) == 8.03


def test_parameters_are_counted_in_the_headers_of_the_files(tmp_path):
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    count = sum(p.numel() for p in loaded.parameters())
    assert ModelFolder(tmp_path, "model.path").num_parameters == count


@pytest.mark.parametrize(
    "content", [b"", b"{}", struct.pack("<Q", 2**60), b"\x05" + bytes(7) + b"{"]
)
def test_a_damaged_file_has_no_parameters_that_count(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert ModelFolder(tmp_path, "model.path").num_parameters == 0


def test_the_parameters_of_an_adapter_are_those_that_peft_makes():
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    shape = ModelShape.of_facts({**SMALL, "tie_word_embeddings": True})
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        settings = LoraSettings.model_validate({"rank": 4, "targets": targets})
        adapted = LlamaForCausalLM(model.config)
        add_adapter(adapted, settings)
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert adapter_size(shape, settings) == trained


def test_activations_are_those_that_autograd_keeps_within_a_fifth():
    shape = ModelShape.of_facts({**SMALL, "tie_word_embeddings": False})
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation="sdpa"))
    (micro_batch,) = make_batch(num_groups=64).pack(100_000, torch.device("cpu"))
    num_tokens = micro_batch.token_ids.numel()
    kept = _kept_bytes(Network(model, temperature=1.0), micro_batch)
    estimate = activation_bytes(shape, 4) * num_tokens * shape.num_layers
    assert 0.8 < estimate / kept < 1.2, (estimate, kept)
    network = Network(LlamaForCausalLM(model.config), temperature=1.0)
    checkpoint_layers(network, on_host=False)
    inputs = shape.num_layers * shape.hidden_size * 4 * num_tokens
    assert inputs < _kept_bytes(network, micro_batch) < 2 * inputs


def _kept_bytes(network: Network, micro_batch: Any) -> int:
    """Of the tensors that a forward pass saves, parameters apart, each memory once."""
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = network(micro_batch)
    assert output.logprobs.requires_grad
    return sum(kept.values())


def test_a_sharded_learner_needs_16_bytes_a_parameter_divided_by_its_ranks(folder):
    learner = {"num_ranks": 8, "gradient_checkpointing": True}
    config = with_model(folder, learner=learner, weights={"dtype": "bfloat16"})
    shape = ModelShape.of_facts(EIGHT_B)
    first = LearnerMemory(config, shape, 8).need()
    other = LearnerMemory(config, shape, 8, sends=False).need()
    assert other.certain_bytes == first.certain_bytes - 2 * 2 * shape.num_parameters
    parts = {part.name: part.num_bytes for part in first.parts}
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states == pytest.approx(16 * shape.num_parameters / 8, abs=8)
    assert parts["weights to send"] == 2 * 2 * shape.num_parameters


@pytest.mark.parametrize(
    ("learner", "gone", "changed"),
    [
        ({"offload": {"optimizer": True}}, {"optimizer"}, set()),
        ({"offload": {"parameters": True}}, {"optimizer", "weights", "gradients"}, set()),
        ({"dtype": "bfloat16"}, set(), {"copies in bfloat16"}),
        ({"lora": {"rank": 8}}, set(), set()),
    ],
)
def test_settings_that_save_memory_are_in_the_estimate(folder, learner, gone, changed):
    shape = ModelShape.of_facts({**EIGHT_B, "num_hidden_layers": 2})
    tokens = {"max_tokens_per_micro_batch": 32_768}
    plain = LearnerMemory(with_model(folder, learner=tokens), shape, 1).need()
    saving = LearnerMemory(with_model(folder, learner={**learner, **tokens}), shape, 1).need()
    names = [{part.name for part in need.parts} for need in (plain, saving)]
    assert names[0] - names[1] == gone
    assert changed <= names[1]
    assert saving.num_bytes < plain.num_bytes


def test_what_an_adapter_freezes_of_a_bfloat16_model_is_there_once(folder):
    shape = ModelShape.of_facts(EIGHT_B)
    learner = {"lora": {"rank": 8}, "dtype": "bfloat16", "gradient_checkpointing": True}
    memory = LearnerMemory(with_model(folder, learner=learner), shape, 1)
    parts = {part.name: part.num_bytes for part in memory.need().parts}
    assert parts["weights"] == 2 * shape.num_parameters + 4 * memory.num_trained
    assert parts["copies in bfloat16"] == 2 * memory.num_trained


def test_the_estimate_grows_with_the_layers_that_are_not_recomputed(folder):
    shape = ModelShape.of_facts(EIGHT_B)
    settings = [{"gradient_checkpointing": every} for every in (True, 1, 2, 4, False)]
    configs = [with_model(folder, learner=learner) for learner in settings]
    needs = [LearnerMemory(config, shape, 1).need().num_bytes for config in configs]
    assert needs[0] == needs[1] < needs[2] < needs[3] < needs[4]


def test_a_critic_of_another_size_is_counted_by_its_own(folder):
    shape = ModelShape.of_facts(EIGHT_B)
    small = ModelShape.of_facts({**EIGHT_B, "num_hidden_layers": 2})
    config = with_model(folder, algorithm={"advantage": "gae"}, learner={"num_ranks": 8})
    assert ModelShape.of_critic(config) == ModelShape.of(config)
    needs = [LearnerMemory(config, shape, 8, critic=critic).need() for critic in (None, small)]
    of_critic = [{p.name: p.num_bytes for p in need.parts}["critic"] for need in needs]
    assert of_critic == [2 * shape.num_parameters, 2 * small.num_parameters]
    value = {"max_tokens_per_micro_batch": 100_000}
    wide = with_model(
        folder, algorithm={"advantage": "gae", "value": value}, learner={"num_ranks": 8}
    )
    assert LearnerMemory(wide, shape, 8).need().num_bytes > needs[0].num_bytes


def test_keys_and_values_are_divided_by_tensor_parallel_size_down_to_one_head():
    shape = ModelShape.of_facts(EIGHT_B)
    assert shape.kv_bytes_per_token(2) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert shape.kv_bytes_per_token(2, 4) == 131_072 // 4
    assert shape.kv_bytes_per_token(2, 16) == 131_072 // 8


def test_layers_that_keep_less_than_keys_and_values_count_as_that():
    """DeepSeek-V2-Lite; and a model of which each fourth layer is no linear attention."""
    latent = {"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    shape = ModelShape.of_facts({**EIGHT_B, **latent})
    assert shape.kv_bytes_per_token(2) == shape.kv_bytes_per_token(2, 4) == 27 * 576 * 2
    kinds = 8 * [*3 * ["linear_attention"], "full_attention"]
    hybrid = ModelShape.of_facts({**EIGHT_B, "layer_types": kinds, "moe_intermediate_size": [8]})
    assert hybrid.kv_bytes_per_token(2) == 131_072 // 4
    assert not ModelShape.of_facts({**EIGHT_B, "model_type": "jamba"}).kv_bytes_per_token(2)


def test_layers_are_divided_by_the_pipeline(folder):
    generator = {"engine": "vllm", "dtype": "bfloat16"}
    one = with_model(folder, generator=generator)
    four = with_model(
        folder, generator={**generator, "engine_kwargs": {"pipeline_parallel_size": 4}}
    )
    shape = ModelShape.of_facts(EIGHT_B)
    for of_four, of_one in zip(
        engine_need(four.generator, shape, four.max_model_len).parts[:2],
        engine_need(one.generator, shape, one.max_model_len).parts[:2],
        strict=True,
    ):
        assert of_four.num_bytes == of_one.num_bytes // 4


def test_what_cannot_fit_is_refused_with_process_host_gpu_bytes_and_remedies(folder):
    with pytest.raises(ConfigError) as refused:
        make_plan(with_model(folder), several(1, 1, gib=80))
    sentence = str(refused.value)
    assert sentence.startswith("learner.device: GPU 0 of host-0 has 80 GiB, which is too little")
    assert "learner needs at least 1" in sentence
    assert "optimizer 59.8 GiB" in sentence
    for remedy in ("learner.num_ranks", "learner.lora", "weights.dtype bfloat16"):
        assert remedy in sentence
    engine = {"engine": "vllm", "max_model_len": 131_072, "max_new_tokens": 1000}
    learner = {"device": "cpu", "max_tokens_per_micro_batch": 200_000}
    with pytest.raises(
        ConfigError, match=r"generator\.device: GPU 0 here has 40 GiB.* at least 61"
    ):
        make_plan(with_model(folder, generator=engine, learner=learner), one_host(1, 40))
    hf, learner = {"engine": "hf"}, {"device": "cpu"}
    data = {"source": "copy", "eval_source": "copy"}
    given = {"generator": hf, "learner": learner, "data": data}
    with pytest.raises(ConfigError, match=r"what would help: validation\.every 0, "):
        make_plan(with_model(folder, **given), one_host(1, 80))
    assert make_plan(with_model(folder, **given, validation={"every": 0}), one_host(1, 80))


def test_a_gpu_of_unknown_memory_and_a_model_elsewhere_refuse_nothing(folder):
    assert process(make_plan(with_model(folder), one_host(2)), "learner").memory is not None
    assert process(make_plan(configured(), one_host(2, 1)), "learner").memory is None


def test_what_may_not_fit_is_noted(folder):
    learner = {"num_ranks": 8, "groups_per_step": 8, "max_tokens_per_micro_batch": 65_536}
    config = with_model(folder, learner=learner, weights={"dtype": "bfloat16"})
    (note, *_) = make_plan(config, one_host(9, 80)).notes
    assert (note.area, note.severity) == (MEMORY, Severity.WARNING)
    assert note.sentence.startswith(
        "learner.device: GPU 0 here may have too little memory, 80 GiB for about"
    )


VLLM = {"engine": "vllm", "dtype": "bfloat16"}


def test_an_engine_alone_keeps_the_default():
    config = configured(generator=VLLM)
    assert fractions(make_plan(config, one_host(2, 80))) == {}


def test_engines_beside_a_learner_get_what_it_leaves(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**EIGHT_B, "num_hidden_layers": 1}))
    config = with_model(tmp_path, generator={**VLLM, "count": 2}, weights={"dtype": "bfloat16"})
    plan = make_plan(config, one_host(1, 80))
    need = process(plan, "learner").memory
    assert need is not None
    left = (0.9 - need.num_bytes / (80 * GIB)) / 2
    given = fractions(plan)
    assert set(given) == {"generator-0", "generator-1"}
    for text in given.values():
        setting, _, value = text.partition("=")
        assert setting == "generator.vllm.gpu_memory_utilization"
        assert left - 0.01 <= float(value) <= left


def test_without_numbers_a_gpu_is_divided_equally():
    plan = make_plan(configured(generator={**VLLM, "count": 2}), one_host(1))
    assert {text.partition("=")[2] for text in fractions(plan).values()} == {"0.30"}
    config = configured(generator={"engine": "sglang"})
    (text,) = fractions(make_plan(config, one_host(1))).values()
    assert text == "generator.sglang.mem_fraction_static=0.38"


def test_a_device_that_is_not_counted_is_divided_by_nobody():
    engines = {**VLLM, "count": 2, "device": "cuda:1"}
    plan = make_plan(configured(generator=engines), one_host(0, is_counted=False))
    assert fractions(plan) == {}


def test_a_fraction_that_was_set_by_hand_stays_and_counts():
    by_hand = {**VLLM, "vllm": {"gpu_memory_utilization": 0.6}}
    assert fractions(make_plan(configured(generator=by_hand), one_host(1, 80))) == {}
    with pytest.raises(ConfigError, match=r"generator-1 needs at least 48 GiB"):
        make_plan(configured(generator={**by_hand, "count": 2}), one_host(1, 80))


@pytest.mark.parametrize(("num_ranks", "lora"), [(1, None), (8, None), (1, {"rank": 4})])
def test_copies_that_rescore_and_teachers_on_a_host_are_counted(folder, num_ranks, lora):
    shape = ModelShape.of_facts(EIGHT_B)
    algorithm = {"preset": "stream", "rescore_share": 0.1}
    teachers = {"distillation": {"teachers": [{"path": "nowhere"}]}}
    learner = {"num_ranks": num_ranks, "lora": lora}
    found = {}
    for name, more in {"none": {}, "teacher": teachers}.items():
        config = with_model(
            folder,
            algorithm={**algorithm, **more},
            buffer={"max_staleness": 3},
            learner=learner,
        )
        of_rank = LearnerMemory(config, shape, num_ranks)
        found[name] = {p.name: p.num_bytes for p in of_rank.on_host(on_cpu=True)}
        assert "teachers" not in {p.name for p in of_rank.on_host(on_cpu=False)}
    # Three versions, and the newest while one of them scores.
    copies = 4 * (4 * of_rank.num_trained // num_ranks)
    assert found["none"] == {"copies for rescore_share": copies}
    assert found["teacher"].keys() == {"copies for rescore_share", "teachers"}
    none = with_model(folder, algorithm=algorithm, buffer={"max_staleness": 0}, learner=learner)
    assert not LearnerMemory(none, shape, num_ranks).on_host(on_cpu=True)


def test_teachers_in_the_learner_are_counted(folder):
    shape = ModelShape.of_facts(EIGHT_B)
    teachers = [{"name": "a", "path": "nowhere"}, {"name": "b", "url": "http://127.0.0.1:1"}]
    algorithm = {"distillation": {"teachers": teachers}}
    config = with_model(folder, algorithm=algorithm, learner={"num_ranks": 8})
    parts = {p.name: p.num_bytes for p in LearnerMemory(config, shape, 8).need().parts}
    assert parts["teachers"] == 4 * shape.num_parameters // 8
