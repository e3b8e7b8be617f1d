"""A step's profile adds up, counts what the model computes, and records the chosen steps."""

import dataclasses
import gzip
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from learners.policy.network import Network
from learners.profiling import PEAK_TFLOPS, NetworkFlops, StepTimes, peak_flops
from streamrl.errors import ConfigError
from tests.training import make_batch, make_config, make_network, make_trainer

CPU = torch.device("cpu")
PARTS = ("plan", "score", "forward", "backward", "update")


def matrix_products(counter: FlopCounterMode) -> int:
    """What torch counted, without attention."""
    counts = counter.get_flop_counts()["Global"]
    names = ("mm", "addmm", "_grouped_mm", "grouped_mm")
    return sum(n for op, n in counts.items() if str(op).split(".")[-1] in names)


def test_a_pass_costs_the_matrix_products_that_torch_counts():
    network, batch = make_network(), make_batch()
    micro_batch = batch.micro_batch(range(len(batch)), CPU)
    lengths, num_logits = micro_batch.packing.lengths, len(micro_batch.targets)
    cost = NetworkFlops.of(network)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(micro_batch)
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    attention = 2 * 4 * 32 * pairs
    assert cost.forward(lengths, num_logits, sum(lengths)) == matrix_products(counter) + attention
    with FlopCounterMode(display=False) as counter:
        network(micro_batch, with_logprobs=False).hidden.sum().backward()
    both = cost.forward(lengths, 0, sum(lengths)) + cost.backward(lengths, 0, sum(lengths))
    # The first layer's input has a gradient, too: it is the embeddings that are trained.
    assert both == matrix_products(counter) + 3 * attention


def test_frozen_weights_cost_a_backward_pass_half():
    network = make_network()
    trained = NetworkFlops.of(network)
    network.requires_grad_(False)
    frozen = NetworkFlops.of(network)
    linear = 2 * trained.num_weights * 100
    assert trained.backward([100], 0, 100) - frozen.backward([100], 0, 100) == linear


def test_a_sliding_window_sees_fewer_pairs():
    config = MistralConfig(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=4,
    )  # fmt: skip
    model = MistralForCausalLM(config)
    cost = NetworkFlops.of(Network(model, temperature=1.0))
    seen = sum(min(i + 1, 4) for i in range(10))
    linear = 2 * cost.num_weights * 10
    assert cost.forward([10], 0, 10) - linear == 4 * 32 * seen


def test_of_experts_those_count_that_a_token_is_routed_to():
    sizes = {
        "vocab_size": 8, "hidden_size": 16, "moe_intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8,
    }  # fmt: skip
    models = [Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts_per_tok=k)) for k in (2, 3)]
    two, three = (NetworkFlops.of(Network(model, temperature=1.0)) for model in models)
    assert three.num_weights - two.num_weights == 3 * 16 * 32


def test_the_phases_are_parts_of_a_step_and_passes_without_gradient_are_apart():
    trainer = make_trainer(make_config(algorithm={"kl_loss": {"coef": 0.3}}))
    trainer.step(make_batch())
    metrics = trainer.step(make_batch(1))
    seconds = [metrics[f"learner/{name}_s"] for name in PARTS]
    assert all(value > 0 for value in seconds)
    assert sum(seconds) <= metrics["learner/train_s"]
    config = make_config(algorithm={"rollout_is": "token_is"})
    plain = make_trainer(config).step(make_batch())
    assert plain["learner/score_s"] == 0
    assert "learner/mfu" not in plain


def test_mfu_is_of_the_peak_that_is_given():
    metrics = make_trainer(make_config(learner={"peak_tflops": 0.5})).step(make_batch())
    assert metrics["learner/mfu"] == pytest.approx(metrics["learner/tflops_per_s"] / 0.5)


def test_operations_do_not_depend_on_how_the_batch_was_cut():
    done = []
    for limit in (10_000, 24):
        learner = {"max_tokens_per_micro_batch": limit}
        config = make_config(algorithm={"advantage": "grpo"}, learner=learner)
        metrics = make_trainer(config).step(make_batch())
        done.append(metrics["learner/tflops_per_s"] * metrics["learner/train_s"])
    assert done[0] == pytest.approx(done[1])


def test_a_step_counts_nothing_of_a_part_that_was_discarded():
    config = make_config(algorithm={"advantage": "grpo", "rollout_is": "token_is"})
    plain, again = make_trainer(config), make_trainer(config)
    again.accumulate(make_batch(1))
    again.discard()
    expected, found = plain.step(make_batch()), again.step(make_batch())
    done = [m["learner/tflops_per_s"] * m["learner/train_s"] for m in (expected, found)]
    assert done[0] == pytest.approx(done[1])
    assert sum(found[f"learner/{name}_s"] for name in PARTS) <= found["learner/train_s"]


def test_the_peak_is_that_of_the_gpu_that_is_named(monkeypatch):
    names = {
        "NVIDIA H100 80GB HBM3": 989.5,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA L4": 121.0,
        "NVIDIA L40": None,
    }
    for name, tflops in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = peak_flops(torch.device("cuda"), "bfloat16", None)
        assert found == (None if tflops is None else 1e12 * tflops), name
    assert peak_flops(CPU, "float32", None) is None
    assert peak_flops(CPU, "float32", 0.5) == 5e11
    assert all(peaks["bfloat16"] > peaks["float32"] for peaks in PEAK_TFLOPS.values())


def test_a_phase_counts_every_time_and_starts_anew():
    times = StepTimes()
    for _ in range(3):
        with times.phase("plan"):
            pass
    assert times.take("plan")["learner/plan_s"] > 0
    assert times.take("plan", "update") == {"learner/plan_s": 0, "learner/update_s": 0}


def test_the_chosen_steps_are_traced_and_no_others(tmp_path):
    run = {"folder": tmp_path, "name": "run"}
    trainer = make_trainer(make_config(run=run, learner={"profiler": {"steps": [5]}}))
    untraced = make_trainer(make_config())
    for seed in range(2):
        batch = dataclasses.replace(make_batch(seed), policy_version=4 + seed)
        trainer.step(batch)
        untraced.step(batch)
    folder = tmp_path / "run" / "profiler"
    assert [path.name for path in folder.iterdir()] == ["step5-rank0.json.gz"]
    with gzip.open(folder / "step5-rank0.json.gz") as file:
        events = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "streamrl/plan", "streamrl/forward", "streamrl/update"} <= events
    weights = untraced.policy.parameters()
    assert all(torch.equal(p, weights[name]) for name, p in trainer.policy.parameters().items())


def test_a_trace_that_cannot_be_written_does_not_end_the_step(tmp_path, caplog):
    (tmp_path / "run").write_text("a file where the folder should be")
    run = {"folder": tmp_path, "name": "run"}
    trainer = make_trainer(make_config(run=run, learner={"profiler": {"steps": [5]}}))
    assert trainer.step(make_batch())["learner/num_tokens"] > 0
    assert "the trace step5-rank0 could not be written" in caplog.text


@pytest.mark.parametrize("setting", ["memory", "nvtx"])
def test_what_needs_a_gpu_is_refused_without(setting):
    config = make_config(learner={"profiler": {setting: True}})
    with pytest.raises(ConfigError, match=f"learner.profiler.{setting}: was true, and .* cpu"):
        make_trainer(config)
