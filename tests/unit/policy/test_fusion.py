"""Which layers are compiled, which have Liger's kernels, and what of a model Liger's change."""

import sys
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from learners.policy import fusion
from learners.policy.network import Network
from streamrl.errors import ConfigError
from streamrl.placement.limits import LIGER_FAMILIES, carries_state, facts_of
from tests.model_families import FAMILIES, STATEFUL, config_of, make_model
from tests.training import make_config, make_network

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler, and liger-kernel."""
    monkeypatch.setattr(fusion, "has_compiler", lambda: True)
    monkeypatch.setattr(fusion, "is_installed", lambda _: True)


@pytest.mark.parametrize(
    ("settings", "is_compiled"),
    [
        ({}, True),
        ({"run": {"max_steps": 299}}, False),
        ({"algorithm": {"router_replay": "record"}}, False),
        ({"learner": {"compile": False}}, False),
        ({"learner": {"liger_layers": True}}, False),
        ({"run": {"max_steps": 1}, "learner": {"compile": True}}, True),
    ],
)
def test_by_default_long_runs_on_a_gpu_are_compiled(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, dict[str, Any]], is_compiled: bool
):
    config = make_config(**{"run": {"max_steps": 300}, **settings})
    assert fusion.compiles(on_gpu(), config) == is_compiled
    on_cpu = config.learner.compile is True
    assert fusion.compiles(make_network(), config) == on_cpu
    monkeypatch.setattr(fusion, "has_compiler", lambda: False)
    assert fusion.compiles(on_gpu(), config) == on_cpu


@pytest.mark.parametrize("family", ["Mamba", "MiniMax", "Qwen3.5"])
def test_a_model_with_a_state_stays_plain_or_is_refused(family: str):
    network = Network(make_model(family), temperature=1.0)
    network.device = CUDA
    run = {"max_steps": 300}
    assert not fusion.compiles(network, make_config(run=run))
    with pytest.raises(ConfigError, match=r"learner\.compile: was true, and layers of .* a state"):
        fusion.compiles(network, make_config(run=run, learner={"compile": True}))


def on_gpu(family: str = "Llama") -> Network:
    """As far as it says."""
    network = Network(make_model(family, num_hidden_layers=1), temperature=1.0)
    network.device = CUDA
    return network


@pytest.mark.parametrize(
    ("learner", "is_liger"),
    [({}, True), ({"liger_layers": False}, False), ({"compile": True}, False)],
)
def test_by_default_short_runs_on_a_gpu_have_the_kernels_of_liger(
    monkeypatch: pytest.MonkeyPatch, learner: dict[str, Any], is_liger: bool
):
    done: list[str] = []
    monkeypatch.setattr(fusion, "use_liger", lambda _: done.append("liger"))
    monkeypatch.setattr(fusion, "compile_layers", lambda _: done.append("compiled"))
    fusion.fuse_layers(on_gpu(), make_config(learner=learner))
    assert ("liger" in done) == is_liger
    assert len(done) <= 1


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("cpu", "learner.device is cpu, not a GPU"),
        ("missing", r"liger-kernel is not installed: pip install 'streamrl\[liger\]'"),
        ("family", "its kernels are not known to compute mamba as transformers does"),
        ("tensor", "learner.mesh.tensor is 2: its kernels take whole matrices"),
    ],
)
def test_what_cannot_have_them_stays_plain_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, case: str, reason: str
):
    network = on_gpu("Mamba" if case == "family" else "Llama")
    if case == "cpu":
        network.device = torch.device("cpu")
    if case == "missing":
        monkeypatch.setattr(fusion, "is_installed", lambda _: False)
    mesh = {"tensor": 2 if case == "tensor" else 1}
    assert not fusion.uses_liger(network, make_config(learner={"mesh": mesh}))
    config = make_config(learner={"mesh": mesh, "liger_layers": True})
    with pytest.raises(ConfigError, match=f"learner.liger_layers: was true, and {reason}"):
        fusion.fuse_layers(network, config)


def test_a_state_is_known_from_the_configuration_alone():
    found = {family for family in FAMILIES if carries_state(facts_of(config_of(family)))}
    assert found == STATEFUL & FAMILIES.keys()


def test_both_at_once_are_refused():
    with pytest.raises(ValueError, match=r"learner\.compile fuses what learner\.liger_layers has"):
        make_config(learner={"compile": True, "liger_layers": True})


def test_the_families_of_liger_are_among_those_that_are_tested():
    tested = {settings["model_type"] for settings in FAMILIES.values()}
    assert tested >= LIGER_FAMILIES


def test_only_the_model_itself_and_rotary_positions_on_a_gpu_are_changed(
    monkeypatch: pytest.MonkeyPatch,
):
    def doubled(module: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * inputs

    def fused_rotary(query: torch.Tensor, *_: torch.Tensor) -> str:
        return "fused"

    def apply(model: Any, **options: bool) -> None:
        """What `apply_liger_kernel_to_llama` does."""
        assert options == {"cross_entropy": False, "fused_linear_cross_entropy": False}
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", fused_rotary)
        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", torch.nn.Identity)
        model.model.norm.forward = MethodType(doubled, model.model.norm)

    liger: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    liger._apply_liger_kernel_to_instance = apply
    for name in ("liger_kernel", "liger_kernel.transformers", liger.__name__):
        monkeypatch.setitem(sys.modules, name, liger)
    plain_rotary, plain_norm = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm
    network, other = make_network(), make_network()
    fusion.use_liger(network)
    inputs = torch.randn(3, network.model.config.hidden_size)
    assert torch.equal(network.model.model.norm(inputs), 2 * inputs)
    assert not torch.equal(other.model.model.norm(inputs), 2 * inputs)
    assert modeling_llama.LlamaRMSNorm is plain_norm
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4)
    cos, sin = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    chosen = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(chosen, plain_rotary(q, k, cos, sin))
    on_a_gpu: Any = type("OnAGpu", (), {"is_cuda": True})()
    assert modeling_llama.apply_rotary_pos_emb(on_a_gpu, k, cos, sin) == "fused"
