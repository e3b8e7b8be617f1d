"""What ranks load together is what one loads alone, in less memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from learners.parallel.mesh import full, make_mesh
from learners.policy.loading import load_network
from streamrl.config.learner import MeshSettings
from streamrl.errors import ConfigError
from tests.model_families import make_model
from tests.ranks import run_ranks
from tests.tiny_model import make_llama, save_llama
from tests.tiny_vision import save_qwen
from tests.training import make_config

LORA = {"rank": 4, "alpha": 16}
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 64}


def save_gpt2(folder: Path) -> None:
    """Whose matrices stand the other way, and whose embeddings are tied."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)


def save_experts(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 40}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(folder)


def save_untied(folder: Path) -> None:
    """An LM head of its own, in spite of what the configuration says."""
    model = make_llama(tie_word_embeddings=False)
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)


def save_untied_qwen(folder: Path) -> None:
    """The same of a text model within another."""
    save_qwen(folder)
    path = folder / "config.json"
    facts = json.loads(path.read_text())
    facts["text_config"]["tie_word_embeddings"] = True
    path.write_text(json.dumps(facts))


def save_half(folder: Path) -> None:
    make_llama().to(torch.bfloat16).save_pretrained(folder)


def save_hybrid(folder: Path) -> None:
    """Whose layers with convolutions do not run packed."""
    make_model("LFM2").save_pretrained(folder)


def save_frozen(folder: Path) -> None:
    """Whose routers have biases that the family does not train."""
    make_model("AFMoE", num_hidden_layers=2).save_pretrained(folder)


def save_longrope(folder: Path) -> None:
    """Whose long trajectories make a call of their own."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    make_llama(rope_parameters={**rope, **factors}, num_attention_heads=4).save_pretrained(folder)


MODELS = {
    "llama": save_llama,
    "bfloat16": save_half,
    "tied": save_gpt2,
    "experts": save_experts,
    "untied": save_untied,
    "hybrid": save_hybrid,
    "longrope": save_longrope,
    "frozen": save_frozen,
}
UNPACKED = ("hybrid", "longrope")


def loaded(folder: str, mesh: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers, whole, which of them are trained, and the random numbers that come
    next."""
    torch.manual_seed(3)
    learner = {"lora": options["lora"]} if "lora" in options else {}
    config = make_config(model={"path": folder}, learner=learner)
    if learner:
        options["lora"] = config.learner.lora
    network = load_network(config, mesh=mesh, **options)
    tensors = [*network.named_parameters(), *network.named_buffers(remove_duplicate=False)]
    named = {name: full(tensor).clone() for name, tensor in tensors}
    trained = torch.tensor([parameter.requires_grad for parameter in network.parameters()])
    packed = torch.tensor(network.is_packed)
    return {**named, "trained": trained, "drawn": torch.rand(3), "packed": packed}


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in MODELS),
    ("llama", {"has_values": True}),
    ("bfloat16", {"lora": LORA}),
)


WITH_PLAN = ("llama", "experts", "untied")
"""For tensor parallelism."""


def on_rank(folder: str, sizes: list[dict[str, int]]) -> list[dict[int, dict[str, torch.Tensor]]]:
    """For each mesh the cases that it can be used with, by number."""
    meshes = [make_mesh(MeshSettings(**size), torch.device("cpu")) for size in sizes]
    return [
        {
            number: loaded(f"{folder}/{name}", mesh, **options)
            for number, (name, options) in enumerate(CASES)
            if mesh.size("tensor") == 1 or (name in WITH_PLAN and "lora" not in options)
            if mesh.size("sequence") == 1 or name not in UNPACKED
        }
        for mesh in meshes
    ]


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [
        (2, [{"shard": 2}, {"sequence": 2}, {"tensor": 2}]),
        pytest.param(
            *(4, [{"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}]),
            marks=pytest.mark.long,
        ),
    ],
    ids=["two ranks", "four ranks"],
)
def test_ranks_load_the_bits_that_one_rank_loads(num_ranks, sizes, tmp_path):
    for name, save in MODELS.items():
        save(tmp_path / name)
    alone = [loaded(f"{tmp_path}/{name}", **options) for name, options in CASES]
    for of_rank in run_ranks(on_rank, num_ranks, tmp_path, str(tmp_path), sizes):
        for size, of_mesh in zip(sizes, of_rank, strict=True):
            assert of_mesh
            for number, ours in of_mesh.items():
                assert ours.keys() == alone[number].keys()
                for key, tensor in alone[number].items():
                    assert torch.equal(ours[key], tensor), (size, CASES[number], key)


@pytest.mark.parametrize(
    ("save", "place"),
    [
        (save_untied, "tie_word_embeddings"),
        (save_untied_qwen, r"text_config\.tie_word_embeddings"),
        (save_llama, None),
        (save_gpt2, None),
    ],
)
def test_a_library_of_inference_goes_by_what_config_json_says_of_the_lm_head(save, place, tmp_path):
    save(tmp_path)
    config = make_config(model={"path": str(tmp_path)}, generator={"engine": "vllm"})
    if place is not None:
        sentence = rf"an LM head of its own, .* says {place}: true, .*generator\.engine vllm"
        with pytest.raises(ConfigError, match=sentence):
            load_network(config)
    else:
        load_network(config)


def peak_growth(folder: str) -> tuple[int, int]:
    """Bytes that this rank's memory grew by at most while it loaded, and of all parameters."""
    mesh = make_mesh(MeshSettings(), torch.device("cpu"))
    config = make_config(model={"path": folder}, learner={"check_packing": False})
    load_network(make_config(model={"path": f"{folder}/small"}), mesh=mesh)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    network = load_network(config, mesh=mesh)
    return _status("VmHWM") - before, 4 * sum(p.numel() for p in network.parameters())


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_only_the_first_rank_has_the_whole_model_while_it_is_loaded(tmp_path):
    save_llama(tmp_path, **WIDE)
    save_llama(tmp_path / "small")
    first, other = run_ranks(peak_growth, 2, tmp_path, str(tmp_path))
    assert first[0] > first[1]
    assert other[0] < 0.75 * other[1]
