"""Blocked log-probabilities equal those of whole logits, forward and backward."""

import pytest
import torch
from torch import Tensor

from streamrl.algorithms import logprobs as module
from streamrl.algorithms.logprobs import LogitTransform, token_logprobs

TRANSFORMS = [
    LogitTransform(),
    LogitTransform(temperature=0.7),
    LogitTransform(softcap=5.0),
    LogitTransform(temperature=1.3, softcap=3.0),
    LogitTransform(temperature=0.9, softcap=4.0, scale=0.5),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BLOCK", 7)
    monkeypatch.setattr(module, "CPU_BLOCK_ELEMENTS", 1)


@pytest.fixture(params=[True, False], ids=["kept", "recomputed"])
def _logits_are_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_ELEMENTS", 1 << 25 if request.param else 0)


@pytest.mark.usefixtures("_logits_are_kept")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_agree_with_log_softmax(
    transform: LogitTransform, with_bias: bool, dtype: torch.dtype
) -> None:
    hidden, weight, targets, bias = _example(dtype, with_bias)
    ours = token_logprobs(hidden, weight, targets, bias, transform, with_entropy=True)
    chosen, entropy = _plainly(hidden, weight, targets, bias, transform)
    assert ours.entropy is not None
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours.logprobs, chosen, **tolerance)
    torch.testing.assert_close(ours.entropy, entropy, **tolerance)
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    upstream = torch.randn(2, len(targets), dtype=dtype)
    for first, second in zip(
        _gradients(ours.logprobs, ours.entropy, upstream, leaves),
        _gradients(chosen, entropy, upstream, leaves),
        strict=True,
    ):
        torch.testing.assert_close(first, second, **tolerance)


def test_gradients_pass_a_numerical_check() -> None:
    hidden, weight, targets, bias = _example(torch.float64, True)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        result = token_logprobs(
            hidden, weight, targets, bias, LogitTransform(0.8, 4.0), with_entropy=True
        )
        assert result.entropy is not None
        return result.logprobs, result.entropy

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_kept_logits_change_no_bit_and_save_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, bias = _example(torch.float32, True)
    products: list[int] = []
    product = module._product
    monkeypatch.setattr(module, "_product", lambda a, b: products.append(1) or product(a, b))
    found = []
    for limit in (1 << 25, 0):
        monkeypatch.setattr(module, "KEPT_ELEMENTS", limit)
        products.clear()
        result = token_logprobs(hidden, weight, targets, bias, with_entropy=True)
        assert result.entropy is not None
        total = result.logprobs.sum() + result.entropy.square().sum()
        gradients = torch.autograd.grad(total, [hidden, weight])
        found.append((len(products), result.logprobs, *gradients))
    (few, *kept), (many, *recomputed) = found
    assert many == 2 * few
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


def test_a_frozen_head_or_frozen_body_gets_no_gradient() -> None:
    hidden, weight, targets, _ = _example(torch.float64, False)
    token_logprobs(hidden, weight.detach(), targets).logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    token_logprobs(hidden.detach(), weight, targets).logprobs.sum().backward()
    assert weight.grad is not None


def test_bfloat16_is_computed_in_float32() -> None:
    hidden, weight, targets, _ = _example(torch.float32, False)
    narrow = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    result = token_logprobs(*narrow, targets)
    assert result.logprobs.dtype == torch.float32
    logits = (narrow[0] @ narrow[1].T).float()
    chosen = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(result.logprobs, chosen)
    gradients = torch.autograd.grad(result.logprobs.sum(), narrow)
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)


def test_autocast_changes_nothing() -> None:
    hidden, weight, targets, _ = _example(torch.float32, False)
    plain = token_logprobs(hidden, weight, targets).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = token_logprobs(hidden, weight, targets).logprobs
    assert torch.equal(mixed, plain)


def test_a_measured_entropy_has_no_gradient() -> None:
    hidden, weight, targets, _ = _example(torch.float32, False)
    result = token_logprobs(hidden, weight, targets, with_entropy=True, trains_entropy=False)
    trained = token_logprobs(hidden, weight, targets, with_entropy=True)
    assert trained.entropy.requires_grad
    assert not result.entropy.requires_grad
    assert torch.equal(result.entropy, trained.entropy)


def test_no_tokens_give_no_logprobs() -> None:
    hidden, weight = torch.zeros(0, 3), torch.zeros(5, 3)
    result = token_logprobs(hidden, weight, torch.zeros(0).long(), with_entropy=True)
    assert result.logprobs.shape == (0,)


def test_wrong_shapes_and_ids_are_refused() -> None:
    hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        token_logprobs(hidden, weight, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="targets"):
        token_logprobs(hidden, weight, torch.tensor([0]))
    with pytest.raises(ValueError, match="must be"):
        token_logprobs(hidden, weight.T, torch.tensor([0, 1]))


def _example(dtype: torch.dtype, with_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(2)
    hidden = torch.randn(6, 4, dtype=dtype, requires_grad=True)
    weight = torch.randn(23, 4, dtype=dtype, requires_grad=True)
    bias = torch.randn(23, dtype=dtype, requires_grad=True) if with_bias else None
    return hidden, weight, torch.tensor([0, 6, 7, 13, 22, 22]), bias


def _plainly(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, transform: LogitTransform
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    log_p = transform(logits if bias is None else logits + bias).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def _gradients(
    logprobs: Tensor, entropy: Tensor, upstream: Tensor, leaves: list[Tensor]
) -> tuple[Tensor, ...]:
    total = (logprobs * upstream[0]).sum() + (entropy * upstream[1]).sum()
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("rows", [1, 1000, 13_900, 1 << 20])
def test_blocks_of_the_vocabulary_have_sizes_that_fast_kernels_take(rows, monkeypatch):
    monkeypatch.setattr(module, "MIN_BLOCK", 256)
    monkeypatch.setattr(module, "CPU_BLOCK_ELEMENTS", 1 << 26)
    sizes = [block.stop - block.start for block in module._blocks(rows, torch.empty(151_936, 0))]
    assert sum(sizes) == 151_936
    assert all(size % 128 == 0 for size in sizes)
