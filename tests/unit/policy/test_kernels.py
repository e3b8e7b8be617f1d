"""Which variable-length kernel attends, and what it is asked for; the kernels are plain fakes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from learners.batch.micro_batch import Packing
from learners.policy import attention
from learners.policy.attention import LayerMask, Scores, _bucketed
from streamrl.errors import ConfigError
from tests.pretended_gpu import PretendedGpu

LENGTHS = (5, 1, 12, 3)


def plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Any, past: int, scale: float | None
) -> torch.Tensor:
    """[N, Q, D] with all scores of a trajectory in memory."""
    outputs = []
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        groups = q.shape[1] // k.shape[1]
        query = q[start:stop].transpose(0, 1)
        key, value = (
            t[start:stop].repeat_interleave(groups, dim=1).transpose(0, 1) for t in (k, v)
        )
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        visible = (distance >= 0) & ((past < 0) | (distance <= past))
        scores = query @ key.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
        shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        outputs.append((shares @ value).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture(params=["flash-attn", "torch", "torch-2.11"])
def kernel(request, monkeypatch):
    """The keywords of each call to a fake of the kernel."""
    calls: list[dict[str, Any]] = []

    def flash(q, k, v, ends_q, ends_k, longest_q, longest_k, **options):
        calls.append(options)
        assert options["causal"]
        assert longest_q == longest_k == max(LENGTHS)
        past, future = options["window_size"]
        assert future == 0
        return plainly(q, k, v, ends_q, past, options["softmax_scale"])

    def ungrouped(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size):
        assert q.shape == k.shape, "without groups each query head has a key-value head"
        return grouped(q, k, v, ends_q, ends_k, longest_q, longest_k, scale, window_size)

    def grouped(q, k, v, ends_q, _, longest_q, longest_k, scale, window_size, enable_gqa=False):
        calls.append({"scale": scale})
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert window_size[1] == 0, "0 to come means causal"
        assert enable_gqa == (q.shape != k.shape)
        return plainly(q, k, v, ends_q, window_size[0], scale)

    is_flash = request.param == "flash-attn"
    monkeypatch.setattr(attention, "_flash_attention", lambda: flash if is_flash else None)
    monkeypatch.setattr(varlen, "varlen_attn", grouped if request.param == "torch" else ungrouped)
    attention._takes_grouped_heads.cache_clear()
    yield calls
    attention._takes_grouped_heads.cache_clear()
    assert ("causal" in calls[0]) == is_flash


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_kernel_attends_as_the_buckets_do(kernel, window, scale):
    torch.manual_seed(0)
    num_tokens = sum(LENGTHS)
    query, key, value = (torch.randn(num_tokens, heads, 8) for heads in (4, 2, 2))
    packing = Packing(LENGTHS, torch.device("cpu"))
    scores = Scores(scale, window, None, None)
    attended = attention._unpadded(query, key, value, packing, scores)
    expected = _bucketed(query, key, value, packing, scores)
    torch.testing.assert_close(attended, expected)
    assert len(kernel) == 1


@pytest.mark.parametrize(
    ("widths", "version", "is_taken"),
    [
        ((64, 64), None, True),
        ((256, 256), None, True),
        ((192, 192), "FA3", True),
        ((224, 224), "FA3", False),
        ((192, 192), "FA4", False),
        ((256, 256), "FA4", True),
        ((512, 512), None, False),
        ((100, 100), None, False),
        ((192, 128), None, False),
    ],
)
def test_heads_that_no_kernel_takes_are_padded(monkeypatch, widths, version, is_taken):
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: version)
    assert attention.takes_width(*widths) == is_taken


def test_without_flash_attn_there_is_torch():
    assert attention._flash_attention() is None


def test_flash_attn_4_alone_is_not_flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both are modules of the package `flash_attn`, and 4 leaves the rest of it out."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    attention._flash_attention.cache_clear()
    assert attention.is_installed("flash_attn.cute")
    assert attention._flash_attention() is None
    del sys.modules["flash_attn"]


CUDA = torch.device("cuda", 0)


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch is told to call in place of its own kernel, on a GPU of capability 9.0."""
    names: list[str] = []
    monkeypatch.setattr(attention, "activate_flash_attention_impl", names.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", names.clear)
    monkeypatch.setattr(
        attention, "current_flash_attention_impl", lambda: names[-1] if names else None
    )
    monkeypatch.setattr(attention, "_require_same", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return names


@pytest.mark.parametrize(
    ("modules", "chosen"),
    [
        ({"flash_attn_interface", "flash_attn.cute"}, ["FA3"]),
        ({"flash_attn.cute"}, ["FA4"]),
        (set(), []),
    ],
)
def test_the_version_made_for_the_gpu_is_taken(activated, monkeypatch, modules, chosen):
    monkeypatch.setattr(attention, "is_installed", modules.__contains__)
    attention.use_flash_attention("auto", torch.device("cpu"))
    attention.use_flash_attention(2, CUDA)
    assert activated == []
    attention.use_flash_attention("auto", CUDA)
    assert activated == chosen


@pytest.mark.parametrize(
    ("device", "modules", "capability", "said"),
    [
        (torch.device("cpu"), (), 9, "learner.device is cpu, not a GPU"),
        (CUDA, (), 9, "there is no module flash_attn_interface"),
        (CUDA, ("flash_attn_interface",), 10, "it is for compute capability 9.x, the GPU has 10.x"),
    ],
)
def test_a_version_that_is_asked_for_and_cannot_be_is_refused(
    activated, monkeypatch, device, modules, capability, said
):
    monkeypatch.setattr(attention, "is_installed", modules.__contains__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))
    with pytest.raises(ConfigError) as refused:
        attention.use_flash_attention(3, device)
    assert str(refused.value) == (
        f"learner.flash_attention: was 3, and {said}; auto takes what is there"
    )
    assert not activated


@pytest.mark.parametrize("fails", ["activate_flash_attention_impl", "_require_same"])
def test_a_version_that_does_not_work_is_passed_over_or_refused(activated, monkeypatch, fails):
    plain = getattr(attention, fails)

    def failing(given: Any) -> None:
        if given == "FA3" or activated == ["FA3"]:
            raise ValueError("too many values to unpack (expected 2)\n\nand more")
        plain(given)

    monkeypatch.setattr(attention, "is_installed", lambda _: True)
    monkeypatch.setattr(attention, fails, failing)
    attention.use_flash_attention("auto", CUDA)
    assert activated == ["FA4"]
    activated.clear()
    with pytest.raises(ConfigError, match=r"was 3, and it does not work: too many values .*; auto"):
        attention.use_flash_attention(3, CUDA)
    assert not activated


@pytest.mark.parametrize("wrong", ["nothing", "output", "gradient"])
def test_a_version_works_if_output_and_gradient_are_those_of_the_buckets(monkeypatch, wrong):
    def attend(q: torch.Tensor, *inputs: Any) -> torch.Tensor:
        attended = _bucketed(q, *inputs)
        if wrong == "gradient":
            return _bucketed(q.detach(), *inputs) + 0 * q
        return attended.neg() if wrong == "output" else attended

    monkeypatch.setattr(attention, "_unpadded", attend)
    if wrong == "nothing":
        attention._require_same(torch.device("cpu"))
        return
    with pytest.raises(AssertionError, match="not close"):
        attention._require_same(torch.device("cpu"))


def attended_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> tuple[str, torch.Size]:
    """Which kernel a pretended GPU is asked for, with keys of which shape."""
    calls: list[tuple[str, torch.Size]] = []

    def recorded(name: str) -> Any:
        def attend(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            calls.append((name, key.shape))
            return query

        return attend

    monkeypatch.setattr(attention, "_unpadded", recorded("variable-length"))
    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded("padded"))
    attention._has_kernels.cache_clear()
    with PretendedGpu():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        q, k = (torch.zeros(1, heads, 40, 64, device=CUDA, dtype=dtype) for heads in (4, 2))
        given = {"packing": Packing((40,), CUDA)}
        attention.packed_attention(torch.nn.Module(), q, k, k, LayerMask(None), **given)
    attention._has_kernels.cache_clear()
    [call] = calls
    return call


def test_gpus_without_variable_length_kernels_get_padded_rows(monkeypatch):
    half = torch.float16
    assert attended_on_a_gpu(monkeypatch, (8, 0), half)[0] == "variable-length"
    assert attended_on_a_gpu(monkeypatch, (7, 5), half)[0] == "padded"


def test_padded_rows_on_a_gpu_have_keys_for_each_query_head(monkeypatch):
    """Torch's kernel that keeps no scores is for equal numbers of heads there."""
    called = attended_on_a_gpu(monkeypatch, (9, 0), torch.float32)
    assert called == ("padded", torch.Size([1, 4, 40, 64]))


def test_torch_knows_the_versions_by_these_names():
    names = {name for name, _ in attention._VERSIONS.values()}
    assert names <= set(torch.nn.attention.list_flash_attention_impls())
