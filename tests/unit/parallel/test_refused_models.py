"""Models whose tokens or matrices ranks cannot share are refused in one sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from learners.policy.sequence_parallel import require_shareable, sequence_block
from learners.policy.sharding import require_plan
from streamrl.errors import ConfigError
from streamrl.placement.limits import require_shared_tokens
from tests.tiny_model import make_llama


def make_mamba():
    return MambaForCausalLM(MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=8))


def make_lfm2():
    layers = ["conv", "full_attention"]
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Lfm2Config(vocab_size=8, num_hidden_layers=2, layer_types=layers, **sizes)
    return Lfm2ForCausalLM(config)


def make_gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=2))


@pytest.mark.parametrize("make_model", [make_mamba, make_lfm2])
def test_tokens_of_layers_that_are_no_attention(make_model):
    with pytest.raises(ConfigError, match=r"mesh\.sequence: was 2, .* that are no attention"):
        require_shareable(make_model(), 2)


def test_a_model_of_attention_alone_in_a_family_of_hybrids_is_taken():
    """As Granite 4.0 Micro is."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_local_experts": 0}
    config = GraniteMoeHybridConfig(
        vocab_size=8, num_hidden_layers=1, layer_types=["full_attention"], mamba_n_heads=4, **sizes
    )
    require_shareable(GraniteMoeHybridForCausalLM(config), 2)
    in_its_file = {"model_type": "granitemoehybrid", "layer_types": ["attention"]}
    require_shared_tokens(in_its_file, 2, has_state=True)


def test_heads_that_are_not_divided():
    model = make_llama()
    require_shareable(model, 2, num_tensor=2)
    with pytest.raises(ConfigError, match=r"sequence: was 3.* the 4 attention heads of llama"):
        require_shareable(model, 3)
    with pytest.raises(ConfigError, match=r"sequence: was 4 x .*tensor 2, .* 4 attention heads"):
        require_shareable(model, 4, num_tensor=2)


def test_a_position_embedding_that_depends_on_the_whole_row():
    ropes = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match=r"mesh\.sequence: was 2, .* the dynamic position embed"):
        require_shareable(make_llama(rope_parameters=ropes), 2)


def test_trajectories_in_rows_of_their_own():
    mesh: Any = SimpleNamespace(size=lambda dimension: 2 if dimension == "sequence" else 1)
    with pytest.raises(ConfigError, match=r"sequence: was 2, .* llama runs each trajectory as a r"):
        sequence_block(make_llama(), mesh, is_packed=False)


def test_a_model_without_a_plan():
    with pytest.raises(ConfigError, match=r"tensor: was 2, and .* no .*plan for gpt2"):
        require_plan(make_gpt2(), 2)


def test_a_plan_that_does_not_fit():
    assert "lm_head" not in require_plan(make_llama(), 2)
    with pytest.raises(ConfigError, match=r"tensor: was 4, .* the 2 key-value heads of llama"):
        require_plan(make_llama(), 4)


def test_a_plan_of_parts_that_the_learner_does_not_train():
    model = make_llama()
    model._tp_plan["model.layers.*.mlp"] = "mla_kv_a_proj"
    with pytest.raises(ConfigError, match="the plan of llama has mla_kv_a_proj"):
        require_plan(model, 2)
