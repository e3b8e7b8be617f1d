"""A LoRA adapter is peft's, trains alone, and leaves the learner merged under the old names."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from actors.engines.hf.engine import SpareWeights
from actors.engines.model import require_same_parameters
from learners.parallel.mesh import described as describe
from learners.policy.lora import (
    adapted_layers,
    adapter_factors,
    add_adapter,
    merged_weights,
    save_adapter,
    with_adapter,
    without_adapter,
)
from streamrl.config.learner import LoraSettings
from streamrl.config.model import ModelSettings
from streamrl.errors import ConfigError, WeightTransferError
from streamrl.weights import lora
from streamrl.weights.layout import manifest_of
from tests.model_families import make_model
from tests.tiny_model import make_llama, save_llama

IDS = torch.arange(2, 14)[None]


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


def make_experts() -> PreTrainedModel:
    return make_model("Qwen3-MoE")


def adapted(model: PreTrainedModel, seed: int = 1, **settings: object) -> PreTrainedModel:
    """With an adapter that changes what the model computes."""
    add_adapter(model, LoraSettings.model_validate({"rank": 4, "alpha": 16, **settings}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B["default"].weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(make):
    plain, model = make()(IDS).logits, make()
    add_adapter(model, LoraSettings())
    assert torch.equal(model(IDS).logits, plain)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (make_llama, "all-linear"),
        (make_gpt2, "all-linear"),
        (make_experts, ("k_proj", "o_proj", "q_proj", "v_proj")),
    ],
)
def test_merged_weights_make_a_model_without_adapter_compute_the_same(make, targets):
    model, plain = adapted(make(), targets=targets), make()
    merged = with_adapter(model)
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict({name: merged[name] for name in merged}, strict=False)
    assert not torch.allclose(make()(IDS).logits, model(IDS).logits, atol=0.1)
    assert torch.allclose(plain(IDS).logits, model(IDS).logits, atol=1e-4)


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_the_factors_that_are_sent_make_the_merged_weights(make):
    model = adapted(make())
    factors, base = adapter_factors(model), dict(make().named_parameters())
    manifest = manifest_of(factors)
    require_same_parameters(manifest, {name: tuple(p.shape) for name, p in base.items()})
    merged = with_adapter(model)
    received = dict(lora.merged(factors.items(), base.__getitem__))
    assert received.keys() == {name for name in merged if not torch.equal(merged[name], base[name])}
    for name, matrix in received.items():
        assert torch.allclose(matrix, merged[name], atol=1e-5), name


@pytest.mark.parametrize("make", [make_llama, make_gpt2])
@pytest.mark.parametrize("kind", [with_adapter, adapter_factors])
def test_what_is_sent_is_described_without_memory(kind, make):
    model = adapted(make())
    described = kind(model, describe)
    assert manifest_of(described) == manifest_of(kind(model))
    assert all(tensor.is_meta for tensor in described.values())


@pytest.mark.parametrize("is_half", [True, False])
def test_factors_of_another_model_are_refused(is_half):
    shapes = {name: tuple(p.shape) for name, p in make_llama(hidden_size=64).named_parameters()}
    manifest = manifest_of(adapter_factors(adapted(make_llama())))
    if is_half:
        shapes = {name: tuple(p.shape) for name, p in make_llama().named_parameters()}
        manifest = manifest[:-1]
    with pytest.raises(WeightTransferError, match="factor model"):
        require_same_parameters(manifest, shapes)


def test_an_engine_merges_factors_into_the_model_that_it_started_with():
    own = make_llama()
    spare = SpareWeights(own)
    for seed in (1, 2, 3):
        model = adapted(make_llama(), seed=seed)
        factors = adapter_factors(model)
        assert spare.landing(manifest_of(factors)) is None
        spare.stage(factors.items())
        spare.swap()
        assert torch.allclose(own(IDS).logits, model(IDS).logits, atol=1e-4)


def test_factors_after_a_whole_model_are_refused():
    own = make_llama()
    spare = SpareWeights(own)
    spare.landing(manifest_of(dict(own.named_parameters())))
    with pytest.raises(WeightTransferError, match="start this generator again"):
        spare.landing(manifest_of(adapter_factors(adapted(make_llama()))))


def test_without_its_adapter_it_is_the_model_it_was():
    model = adapted(make_llama())
    before = model(IDS).logits
    with without_adapter(model):
        assert torch.equal(model(IDS).logits, make_llama()(IDS).logits)
    assert torch.equal(model(IDS).logits, before)
    assert any(p.requires_grad for p in model.parameters())


def test_peft_loads_a_saved_adapter(tmp_path: Path):
    from peft import PeftModel

    base = save_llama(tmp_path / "base")
    model = adapted(make_llama(), targets=["q_proj", "down_proj"])
    settings = LoraSettings(rank=4, alpha=16, targets=("q_proj", "down_proj"))
    adapter = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    save_adapter(settings, str(base), adapter, tmp_path)
    loaded = PeftModel.from_pretrained(make_llama(), tmp_path)
    assert torch.allclose(loaded(IDS).logits, model(IDS).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (["k_proj", "q_prjo"], "'q_prjo', .* did you mean 'q_proj'"),
        (["lm_head"], "'lm_head', which is no linear layer"),
        (["embed_tokens"], "'embed_tokens', which is no linear layer"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets, sentence):
    with pytest.raises(ConfigError, match=rf"learner\.lora\.targets: .*{sentence}"):
        add_adapter(make_llama(), LoraSettings(targets=tuple(targets)))


def test_an_embedding_is_no_target():
    with pytest.raises(ConfigError, match=r"would adapt .*wpe, which is no linear layer .*layers$"):
        add_adapter(make_gpt2(), LoraSettings(targets=("wpe",)))


def test_experts_in_one_tensor_are_no_target():
    found = get_peft_model(make_experts(), LoraConfig(target_modules="all-linear"))
    if not any("experts" in name and "lora_" in name for name, _ in found.named_parameters()):
        pytest.skip("this release of peft leaves them out by itself")
    sentence = r"would adapt .*mlp\.experts, .*\[gate, k_proj, o_proj, q_proj, v_proj\]"
    with pytest.raises(ConfigError, match=rf"learner\.lora\.targets: {sentence}"):
        add_adapter(make_experts(), LoraSettings(targets="all-linear"))


def test_a_base_model_that_cannot_be_read_is_an_error_of_the_files(tmp_path):
    """Which a learner that saves waits for, as for a full disk."""
    with pytest.raises(OSError, match="none"):
        merged_weights(LoraSettings(), ModelSettings(path=str(tmp_path / "none")), {})
