"""At start, packed is compared with plain transformers; the run goes on as it was."""

import logging
from pathlib import Path

import pytest
import torch

from learners.batch.micro_batch import MicroBatch, Packing
from learners.policy.attention import (
    LayerMask,
    UnsupportedAttention,
    layer_mask,
    packed_attention,
)
from learners.policy.loading import load_network
from learners.policy.network import Network
from learners.policy.packing_check import choose_packing
from learners.policy.policy import Policy
from learners.trainer import Trainer
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from tests.model_families import make_model, plain_logprobs
from tests.tiny_model import make_llama, save_llama
from tests.training import make_config, make_micro_batch

LENGTHS = (1, 19, 2, 24, 9)


def make_network(family: str, **overrides: object) -> Network:
    return Network(make_model(family, **overrides), temperature=1.0)


def config_of(folder: Path, **learner: object) -> RunConfig:
    return make_config(model={"path": str(folder)}, learner=learner)


def logprobs_of(network: Network, micro_batch: MicroBatch) -> torch.Tensor:
    logprobs = network(micro_batch).logprobs
    assert logprobs is not None
    return logprobs


def test_a_recurrent_model_runs_unpacked_and_the_log_says_why(caplog: pytest.LogCaptureFixture):
    network = make_network("LFM2")
    with caplog.at_level(logging.INFO, "learners"):
        choose_packing(network)
    (record,) = [r for r in caplog.records if r.name.startswith("learners")]
    assert not network.is_packed
    assert "run unpacked" in record.message
    # The difference, or that transformers itself refuses, from 5.20 on.
    assert "nats" in record.message or "causal_conv1d" in record.message


def test_attention_alone_runs_packed_and_is_not_worth_a_line(caplog: pytest.LogCaptureFixture):
    network = make_network("Gemma 2")
    with caplog.at_level(logging.INFO, "learners"):
        choose_packing(network)
    assert network.is_packed
    assert not [r for r in caplog.records if r.name.startswith("learners")]


def test_a_model_that_the_learner_does_not_know_is_refused_with_the_gap():
    """ModernBERT's head has a layer before the matrix that the learner takes for it."""
    with pytest.raises(ConfigError, match=r"this modernbert-decoder model .* nats on average"):
        choose_packing(make_network("ModernBERT-decoder"))


def test_a_scaling_that_the_learner_does_not_know_is_refused():
    model = make_model("Granite")
    model.config.model_type = "unheard-of"
    with pytest.raises(ConfigError, match="would be trained wrongly"):
        choose_packing(Network(model, temperature=1.0))


def test_the_comparison_is_made_at_the_temperature_of_the_run():
    network = Network(make_model("Gemma 2"), temperature=0.7)
    choose_packing(network)
    assert network.is_packed


def test_the_comparison_leaves_nothing_behind():
    network = make_network("Qwen3-Next")
    parameters = {name: p.clone() for name, p in network.named_parameters()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    choose_packing(network)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in network.named_parameters():
        assert parameter.grad is None
        assert parameter.requires_grad
        assert torch.equal(parameter, parameters[name])


def test_loading_compares_unless_it_is_switched_off(tmp_path: Path):
    model = make_model("Nemotron")
    model.save_pretrained(tmp_path)
    assert not load_network(config_of(tmp_path)).is_packed
    assert load_network(config_of(tmp_path, check_packing=False)).is_packed
    with pytest.raises(UnsupportedAttention, match="not told where trajectories end"):
        load_network(config_of(tmp_path, check_packing=False))(make_micro_batch(LENGTHS))


def test_reference_and_critic_follow_the_policy(tmp_path: Path):
    config = config_of(save_llama(tmp_path))
    policy, reference = Policy.from_config(config), Policy.from_config(config)
    policy.network.run_packed(False)
    Trainer(config, policy, reference)
    assert not reference.network.is_packed


@pytest.mark.parametrize("recomputes", [False, True])
def test_two_passes_of_a_model_with_dropout_are_equal(tmp_path: Path, recomputes: bool):
    make_model("GPT-2", attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5).save_pretrained(tmp_path)
    config = config_of(tmp_path, gradient_checkpointing=recomputes)
    micro_batch = make_micro_batch(LENGTHS)
    for has_values in (False, True):
        network = load_network(config, has_values=has_values)
        first, second = (logprobs_of(network, micro_batch) for _ in range(2))
        assert torch.equal(first, second)
    gradients = []
    for setting in (recomputes, not recomputes):
        network = load_network(config_of(tmp_path, gradient_checkpointing=setting))
        logprobs_of(network, micro_batch).sum().backward()
        gradients.append([p.grad for p in network.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "family",
    [
        "Llama",
        "Mistral with windows",
        "Qwen3-MoE",
        "Qwen3-Next",
        "LFM2",
        "Gemma 2",
        "gpt-oss",
        "Granite",
        "Cohere 2",
        "Phi-3 with LongRoPE",
        "Mamba 2",
    ],
)
def test_gradients_are_those_of_transformers(family: str):
    network, micro_batch = make_network(family), make_micro_batch(LENGTHS)
    choose_packing(network)
    logprobs_of(network, micro_batch).sum().backward()
    plain = make_model(family)
    plain.set_attn_implementation("eager")
    for row in micro_batch.token_ids[0].split(LENGTHS):
        plain_logprobs(plain, row).sum().backward()
    for (name, mine), theirs in zip(
        network.model.named_parameters(), plain.parameters(), strict=True
    ):
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        found = torch.zeros_like(mine) if mine.grad is None else mine.grad
        gap = (found - expected).abs().max() / (1 + expected.abs().max())
        assert gap < 1e-4, name


def test_values_and_entropy_of_an_unpacked_model_are_those_of_each_trajectory():
    model = make_model("LFM2")
    network = Network(model, temperature=1.0, has_values=True)
    assert network.value_head is not None
    torch.nn.init.normal_(network.value_head.weight)
    micro_batch = make_micro_batch(LENGTHS)
    with torch.no_grad():
        output = network(micro_batch, with_entropy=True)
        rows = micro_batch.token_ids[0].split(LENGTHS)
        plain = [model(input_ids=row[None], output_hidden_states=True) for row in rows]
        logits = torch.cat([one.logits[0, :-1] for one in plain]).log_softmax(-1)
        states = torch.cat([one.hidden_states[-1][0, :-1] for one in plain])
        values = network.value_head(states)[:, 0]
    torch.testing.assert_close(output.entropy, -(logits.exp() * logits).sum(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(output.values, values, atol=1e-4, rtol=0)


def test_a_trajectory_beyond_a_dynamic_position_embedding_is_refused():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = make_llama(max_position_embeddings=20, rope_parameters=dynamic)
    network = Network(model, temperature=1.0)
    logprobs_of(network, make_micro_batch((20, 5)))
    with pytest.raises(ConfigError, match="trajectories of 21 tokens, and beyond 20"):
        network(make_micro_batch((21, 5)))


class _Attention(torch.nn.Module):
    is_causal = True


def attend(module: torch.nn.Module | None = None, mask: object = None, **arguments: object):
    packing = Packing((2, 3), torch.device("cpu"))
    states = [torch.randn(1, 2, 5, 4) for _ in range(3)]
    mask = layer_mask() if mask is None else mask
    return packed_attention(
        module or _Attention(),
        *states,
        mask,  # type: ignore[arg-type]
        packing=packing,
        **arguments,  # type: ignore[arg-type]
    )


def test_attention_refuses_what_it_does_not_compute():
    attend(position_ids=torch.arange(5), is_causal=True, dropout=0.0, head_mask=None)
    for arguments in (
        {"position_bias": torch.zeros(5, 5)},
        {"dropout": 0.1},
        {"indices": torch.zeros(5)},
        {"is_causal": False},
        {"mask": torch.ones(1, 1, 5, 5)},
    ):
        with pytest.raises(UnsupportedAttention):
            attend(**arguments)  # type: ignore[arg-type]
    encoder = _Attention()
    encoder.is_causal = False
    with pytest.raises(UnsupportedAttention, match="is not causal"):
        attend(encoder)


def test_the_window_is_that_of_the_mask():
    """Some models make masks with windows and do not pass the window to attention."""
    torch.manual_seed(0)
    whole, _ = attend()
    torch.manual_seed(0)
    windowed, _ = attend(mask=LayerMask(2))
    assert torch.equal(whole[0, :4], windowed[0, :4])
    assert not torch.allclose(whole[0, 4], windowed[0, 4])
