"""What of a model and a CPU vLLM is refused for before it starts."""

from pathlib import Path

import pytest

from actors.engines.model import ModelFacts
from actors.engines.vllm import cpu
from actors.engines.vllm.server import open_vllm
from streamrl.errors import ConfigError
from tests.engines import run_config
from tests.model_families import make_model
from tests.ports import free_port
from tests.tiny_model import save_llama


def facts_of(head_width: int | None) -> ModelFacts:
    return ModelFacts(shapes={}, eos=frozenset(), vocab_size=9, head_width=head_width)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [8, 16, 40, 144])
def test_a_head_width_without_a_kernel_is_refused(width: int, dtype: str):
    config = run_config(Path("narrow"), dtype=dtype)
    message = rf"model\.path: narrow has attention heads of width {width}, .*32, 48, .*engine hf"
    with pytest.raises(ConfigError, match=message):
        cpu.require_servable(config, facts_of(width))


def test_a_mixture_of_experts_is_refused(tmp_path):
    make_model("Mixtral", head_dim=32).save_pretrained(tmp_path)
    config = run_config(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: .* has experts, .*engine hf"):
        cpu.require_servable(config, ModelFacts.of(config.model))


def test_amx_tiles_that_the_system_does_not_grant_are_refused(monkeypatch):
    monkeypatch.setattr(cpu, "request_amx", lambda: False)
    with pytest.raises(ConfigError, match=r"generator\.dtype: was bfloat16, .* float32"):
        cpu.require_servable(run_config(Path("m"), dtype="bfloat16"), facts_of(64))
    cpu.require_servable(run_config(Path("m"), dtype="float32"), facts_of(64))


@pytest.mark.parametrize("width", [None, 32, 64, 128])
def test_other_models_are_not_refused(monkeypatch, width: int | None):
    monkeypatch.setattr(cpu, "request_amx", lambda: True)
    cpu.require_servable(run_config(Path("m"), dtype="bfloat16"), facts_of(width))


def test_facts_of_a_model_have_its_head_width(tmp_path):
    for overrides, width in (({}, 8), ({"head_dim": 48}, 48)):
        folder = save_llama(tmp_path / str(width), **overrides)
        assert ModelFacts.of(run_config(folder).model).head_width == width


def test_a_vllm_elsewhere_is_refused_for_this_cpu_only_if_it_runs_on_it(tmp_path, monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    server = {"url": url, "start_timeout_s": 0.1}
    config = run_config(save_llama(tmp_path), engine="vllm", vllm=server)
    monkeypatch.setattr("actors.engines.vllm.server.has_gpu", lambda: False)
    with pytest.raises(ConfigError, match="attention heads of width 8"):
        open_vllm(config)
    monkeypatch.setattr("actors.engines.vllm.server.has_gpu", lambda: True)
    with pytest.raises(ConfigError, match=f"no inference server at {url}"):
        open_vllm(config)
