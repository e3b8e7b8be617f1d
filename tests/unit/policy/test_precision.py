"""`learner.dtype`: products in it, sums in float32, and master weights that stay float32."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from learners.optimizer import LossScale
from learners.policy import sharding
from learners.policy.hugging_face import kept_in_float32
from learners.policy.lora import adapted_layers, add_adapter
from learners.policy.network import Network
from learners.policy.policy import Policy
from learners.policy.sharding import compute_in, master_of
from learners.trainer import Trainer
from streamrl.algorithms import logprobs as logprobs_module
from streamrl.config.learner import LoraSettings
from streamrl.config.weights import WeightSettings
from streamrl.errors import DivergedError
from streamrl.weights.layout import dtype_of
from tests.model_families import make_model
from tests.training import make_batch, make_config, make_critic, make_micro_batch, make_network

BF16 = torch.bfloat16
VOCABULARY, LENGTHS = 2048, (60, 37, 100, 64)


class Operations(TorchDispatchMode):
    """Records (name, dtypes of the tensors it takes, elements of its largest result)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[tuple[str, frozenset[torch.dtype], int, tuple[int, ...]], ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        largest = max(made, key=torch.Tensor.numel, default=torch.empty(0))
        dtypes = frozenset(tensor.dtype for tensor in given)
        name = func.name().removeprefix("aten::").split(".")[0]
        self.seen = (*self.seen, (name, dtypes, largest.numel(), tuple(largest.shape)))
        return result


def operations(dtype: torch.dtype, **passes: bool) -> Operations:
    """Of one forward and backward pass."""
    network = make_network(dtype=dtype, vocab_size=VOCABULARY)
    with Operations() as recorded:
        output = network(make_micro_batch(LENGTHS), **passes)
        columns = (output.logprobs, output.entropy)
        sum(c.square().mean() for c in columns if c is not None).backward()
    return recorded


def test_matrix_products_and_attention_compute_in_the_dtype() -> None:
    seen = operations(BF16).seen
    products = [(name, dtypes, shape) for name, dtypes, _, shape in seen if name in ("mm", "addmm")]
    attention = [dtypes for name, dtypes, *_ in seen if "scaled_dot_product" in name]
    assert len(products) > 40
    assert all(dtypes == {BF16} for _, dtypes, _ in products), products
    assert len(attention) >= 4
    # The kernel's own log-sum-exp is float32; queries, keys and values are not.
    assert all(BF16 in dtypes for dtypes in attention)


def test_queries_keys_and_values_reach_attention_in_the_dtype(monkeypatch) -> None:
    from learners.policy import attention

    seen = []
    original = attention.scaled_dot_product_attention

    def record(query, key, value, **options):
        seen.append({query.dtype, key.dtype, value.dtype})
        return original(query, key, value, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", record)
    make_network(dtype=BF16)(make_micro_batch(LENGTHS))
    assert len(seen) >= 2
    assert all(dtypes == {BF16} for dtypes in seen)


def test_values_are_summed_in_float32() -> None:
    network = make_network(dtype=BF16, has_values=True)
    with torch.no_grad():
        master_of(network.value_head.weight).fill_(0.1)
    output = network(make_micro_batch(LENGTHS))
    assert output.values.dtype == torch.float32
    weight = torch.tensor(0.1).bfloat16().float()
    torch.testing.assert_close(output.values, output.hidden.float().sum(1) * weight)


def test_sums_over_the_vocabulary_are_float32() -> None:
    seen = operations(BF16, with_entropy=True).seen
    sums = [dtypes for name, dtypes, *_ in seen if name in ("logsumexp", "logaddexp", "exp_")]
    assert sums
    assert all(dtypes == {torch.float32} for dtypes in sums)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("trains_entropy", [False, True])
def test_no_tensor_of_a_step_has_the_logits_of_a_batch(
    dtype: torch.dtype, trains_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs_module, "CPU_BLOCK_ELEMENTS", 1)
    seen = operations(dtype, with_entropy=True, trains_entropy=trains_entropy).seen
    num_logits = (sum(LENGTHS) - len(LENGTHS)) * VOCABULARY
    assert max(elements for *_, elements, _ in seen) < num_logits / 4


def test_logprobs_are_near_those_of_float32() -> None:
    micro_batch = make_micro_batch(LENGTHS)
    with torch.no_grad():
        exact = make_network()(micro_batch, with_entropy=True)
        narrow = make_network(dtype=BF16)(micro_batch, with_entropy=True)
    assert narrow.logprobs.dtype == narrow.entropy.dtype == torch.float32
    difference = (narrow.logprobs - exact.logprobs).abs()
    assert 0 < difference.mean() < 0.03
    assert difference.max() < 0.3
    torch.testing.assert_close(narrow.entropy, exact.entropy, atol=0.1, rtol=0)


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    parts = [make_micro_batch(LENGTHS, seed) for seed in range(3)]

    def gradients(*micro_batches: Any) -> dict[str, torch.Tensor]:
        policy = Policy(make_network(dtype=BF16))
        for micro_batch in micro_batches:
            policy(micro_batch).logprobs.mean().backward()
        assert all(p.grad is None for p in policy.model.parameters()), "kept in the narrow dtype"
        return {name: p.grad for name, p in policy.parameters().items()}

    single = [gradients(part) for part in parts]
    for name, gradient in gradients(*parts).items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, single[0][name] + single[1][name] + single[2][name]), name


def test_a_step_changes_float32_masters_which_the_next_pass_follows() -> None:
    network = make_network(dtype=BF16)
    policy = Policy(network)
    trainer = Trainer(make_config(), policy)
    before = {name: p.detach().clone() for name, p in policy.parameters().items()}
    trainer.step(make_batch())
    after = policy.parameters()
    assert after.keys() == dict(make_network().model.named_parameters()).keys()
    for name, parameter in after.items():
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, before[name]), name
    for state in trainer.optimizer.state.values():
        assert state["exp_avg"].dtype == torch.float32
    # Steps smaller than the narrow dtype resolves are kept.
    assert not all(torch.equal(p, p.bfloat16().float()) for p in after.values())
    policy(make_micro_batch(LENGTHS))
    for copy in policy.model.parameters():
        assert copy.dtype == BF16
        assert torch.equal(copy, master_of(copy).bfloat16())


def test_what_is_saved_is_the_master_weights() -> None:
    policy = Policy(make_network(dtype=BF16))
    expected = make_network().model.state_dict()
    saved = policy.parameters()
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name


def test_tied_weights_stay_tied() -> None:
    network = make_network(dtype=BF16, tie_word_embeddings=True)
    model = network.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = set(Policy(network).parameters())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_frozen_network_has_no_second_copy() -> None:
    network = make_network().requires_grad_(False)
    compute_in(network, BF16)
    assert all(p.dtype == BF16 and master_of(p) is p for p in network.parameters())


@pytest.mark.parametrize("is_exact", [True, False])
def test_what_an_adapter_freezes_has_no_master_where_the_dtype_holds_it(is_exact, monkeypatch):
    def adapted() -> Policy:
        model = make_network().model
        if is_exact:
            model.bfloat16().float()
        torch.manual_seed(0)
        settings = LoraSettings(rank=2)
        add_adapter(model, settings)
        for layer in adapted_layers(model).values():
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
        return Policy(Network(model, temperature=1.0), settings)

    policy, exact, other = adapted(), adapted(), adapted()
    compute_in(policy.network, BF16)
    with monkeypatch.context() as patch:
        patch.setattr(sharding, "narrow_frozen", lambda *_: None)
        compute_in(other.network, BF16)
    frozen = [p for p in policy.network.parameters() if not p.requires_grad]
    assert all(p.dtype == BF16 for p in frozen)
    assert {master_of(p) is p for p in frozen if p.ndim == 2} == {is_exact}
    for name, tensor in exact.weights().items():
        assert torch.equal(policy.weights()[name], tensor), name
        assert policy.weights()[name].dtype == torch.float32
    assert policy.layout(WeightSettings()) == exact.layout(WeightSettings())
    for one in (policy, other):
        one(make_micro_batch(LENGTHS)).logprobs.sum().backward()
    for name, parameter in policy.parameters().items():
        assert torch.equal(parameter.grad, other.parameters()[name].grad), name


@pytest.mark.parametrize("family", ["ERNIE 4.5-MoE", "Inkling"])
def test_what_transformers_keeps_in_float32_stays_so(family, tmp_path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    expected = {name: p.dtype for name, p in loaded.named_parameters()}
    assert set(expected.values()) == {torch.float32, BF16}
    # transformers 5.24 keeps one number of a gate, of which the rest is narrow.
    expected |= {name: BF16 for name in expected if name.endswith("gate.global_scale")}
    network = Network(model, temperature=1.0)
    compute_in(network, BF16)
    assert {name: p.dtype for name, p in model.named_parameters()} == expected
    sent = Policy(network).layout(WeightSettings(dtype="bfloat16")).manifest
    assert all(dtype_of(spec) == expected[spec.name] for spec in sent)
    network(make_micro_batch((5, 9))).logprobs.sum().backward()


@pytest.mark.parametrize("left", ["norm", "lm_head", "base", r"q_proj\.bias"])
def test_norms_embeddings_adapters_and_parts_of_modules_are_computed_in_the_narrow_dtype(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("Qwen2")
    monkeypatch.setattr(model, "_get_dtype_plan", lambda dtype: {left: torch.float32})
    assert kept_in_float32(model, BF16) == frozenset()
    add_adapter(model, LoraSettings(rank=2))
    assert kept_in_float32(model, BF16) == frozenset()


def test_float32_computes_with_the_parameters_themselves() -> None:
    network = make_network()
    before = dict(network.named_parameters())
    compute_in(network, torch.float32)
    assert all(before[name] is p is master_of(p) for name, p in network.named_parameters())


def trainer_in(dtype: str, **sections: Any) -> Trainer:
    config = make_config(learner={"dtype": dtype}, **sections)
    critic = make_critic(config) if config.algorithm.needs_values else None
    return Trainer(config, Policy(make_network(dtype=getattr(torch, dtype))), critic=critic)


@pytest.mark.parametrize("algorithm", [{}, {"advantage": "gae"}])
def test_a_step_in_float16_is_near_that_of_float32(algorithm: dict[str, Any]) -> None:
    exact, narrow = (trainer_in(dtype, algorithm=algorithm) for dtype in ("float32", "float16"))
    expected, found = exact.step(make_batch()), narrow.step(make_batch())
    assert found["learner/loss_scale"] == 2**16
    assert "learner/loss_scale" not in expected
    for name in ("learner/grad_norm", "critic/grad_norm"):
        assert found.get(name) == pytest.approx(expected.get(name), rel=0.02)


def test_the_scale_keeps_gradients_that_float16_has_no_numbers_for() -> None:
    losses = {"algorithm": {"rl_loss_coef": 1e-6}}
    expected = trainer_in("float32", **losses).step(make_batch())["learner/grad_norm"]
    trainer = trainer_in("float16", **losses)
    assert trainer.step(make_batch())["learner/grad_norm"] == pytest.approx(expected, rel=0.05)
    trainer = trainer_in("float16", **losses)
    trainer._scale.value = 1.0
    assert trainer.step(make_batch())["learner/grad_norm"] != pytest.approx(expected, rel=0.05)


def test_an_overflow_halves_the_scale_and_changes_nothing_else() -> None:
    trainer = trainer_in("float16", optimizer={"max_skipped_updates": 0})
    trainer._scale.value = 2.0**40
    before = [p.detach().clone() for p in trainer.policy.parameters().values()]
    assert trainer.step(make_batch())["learner/skipped_update"] == 1
    assert all(map(torch.equal, before, trainer.policy.parameters().values()))
    assert trainer.state_dict() == {**trainer.credit.state_dict(), **scale_of(2.0**39, 0)}
    while trainer.step(make_batch())["learner/skipped_update"]:
        pass
    assert 1 < trainer._scale.value < 2.0**39


def test_the_scale_grows_after_finite_gradients_and_goes_on_where_it_was() -> None:
    scale = LossScale("float16")
    for _ in range(1999):
        assert not scale.follow({"learner/skipped_update": 0.0})
    other = LossScale("float16")
    other.load_state_dict(scale.state_dict())
    other.follow({"learner/skipped_update": 0.0})
    assert (scale.value, other.value) == (2.0**16, 2.0**17)
    other.load_state_dict({"kl_coef": 0.1})
    assert other.state_dict() == scale_of(2.0**17, 0)
    assert LossScale("bfloat16").state_dict() == {}


def test_a_gradient_that_no_scale_makes_finite_ends_the_training() -> None:
    trainer = trainer_in("float16", optimizer={"max_skipped_updates": 0})
    with torch.no_grad():
        trainer.policy.model.get_output_embeddings().weight[5, 0] = torch.nan
        master_of(trainer.policy.model.get_output_embeddings().weight)[5, 0] = torch.nan
    for _ in range(16):
        assert trainer.step(make_batch())["learner/skipped_update"] == 1
    with pytest.raises(DivergedError):
        trainer.step(make_batch())


def scale_of(value: float, num_finite: int) -> dict[str, float]:
    return {"loss_scale": value, "num_finite": num_finite}
