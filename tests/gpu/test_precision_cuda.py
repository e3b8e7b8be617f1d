"""Half precision on a GPU: each variable-length kernel, the whole forward pass; Liger's kernels."""

from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from learners.batch.micro_batch import Packing  # noqa: E402
from learners.policy import attention  # noqa: E402
from learners.policy.attention import Scores, _bucketed  # noqa: E402
from learners.policy.fusion import use_liger  # noqa: E402
from learners.policy.network import Network  # noqa: E402
from learners.policy.sharding import compute_in  # noqa: E402
from streamrl.algorithms.logprobs import token_logprobs  # noqa: E402
from streamrl.placement.limits import LIGER_FAMILIES  # noqa: E402
from tests.model_families import (  # noqa: E402
    FAMILIES,
    assert_alike,
    gradients_of,
    make_model,
)
from tests.tiny_model import make_llama  # noqa: E402
from tests.training import make_batch  # noqa: E402

CUDA = torch.device("cuda")
LENGTHS = (130, 1, 64, 37)


@pytest.mark.parametrize("is_flash", [False, True])
@pytest.mark.parametrize("window", [None, 16])
def test_kernels_attend_as_the_buckets_do(is_flash, window, monkeypatch) -> None:
    if is_flash and attention._flash_attention() is None:
        pytest.skip("needs flash-attn")
    if not is_flash:
        monkeypatch.setattr(attention, "_flash_attention", lambda: None)
    torch.manual_seed(0)
    packing = Packing(LENGTHS, CUDA)
    q, k, v = (
        torch.randn(sum(LENGTHS), heads, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    attended = attention._unpadded(q, k, v, packing, Scores(None, window))
    expected = _bucketed(q.float(), k.float(), v.float(), packing, Scores(None, window, None, None))
    torch.testing.assert_close(attended.float(), expected, atol=2e-2, rtol=2e-2)
    upstream = torch.randn_like(expected)
    ours = torch.autograd.grad((attended.float() * upstream).sum(), (q, k, v))
    plain = torch.autograd.grad((expected * upstream).sum(), (q, k, v))
    torch.testing.assert_close(ours, plain, atol=5e-2, rtol=5e-2)


def test_torchs_own_kernel_passes_the_trial_of_those_in_its_place() -> None:
    attention._require_same(CUDA)


def test_logprobs_in_bfloat16_are_near_those_of_float32() -> None:
    (micro_batch,) = make_batch().pack(10_000, CUDA)
    exact = Network(make_llama().to(CUDA), temperature=1.0)(micro_batch)
    network = Network(make_llama().to(CUDA), temperature=1.0)
    compute_in(network, torch.bfloat16)
    narrow = network(micro_batch, with_entropy=True)
    assert narrow.logprobs.dtype == torch.float32
    assert (narrow.logprobs - exact.logprobs).abs().mean() < 0.03
    narrow.logprobs.mean().backward()


def test_logits_of_half_precision_are_not_rounded() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(64, 128, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(5003, 128, device=CUDA, dtype=torch.bfloat16)
    targets = (hidden @ weight.T).argmax(1)
    exact = (hidden.double() @ weight.double().T).log_softmax(1)
    chosen = exact.gather(1, targets[:, None]).squeeze(1)
    found = token_logprobs(hidden, weight, targets).logprobs
    torch.testing.assert_close(found.double(), chosen, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not find_spec("liger_kernel"), reason="needs liger-kernel")
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if FAMILIES[f]["model_type"] in LIGER_FAMILIES]
)
def test_layers_with_the_kernels_of_liger_have_the_gradients_of_plain_ones(family: str) -> None:
    network = Network(make_model(family).to(CUDA), temperature=1.0)
    (micro_batch,) = make_batch().pack(10_000, CUDA)
    plain = gradients_of(network, network(micro_batch).logprobs)
    use_liger(network)
    assert_alike(gradients_of(network, network(micro_batch).logprobs), plain)
