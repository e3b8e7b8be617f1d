"""Which engine a configuration gets, and what it is told if it cannot have it."""

import pytest

from actors import engines
from streamrl.config import RunConfig
from streamrl.errors import ConfigError


def config(engine: str, **generator: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "nowhere"},
            "data": {"source": "copy"},
            "generator": {"engine": engine, **generator},
        }
    )


def test_a_missing_vllm_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vLLM is not installed here; .*make .venv-vllm"):
        engines.make_engine(config("vllm"), seed=0)


def test_an_unknown_engine_is_named():
    with pytest.raises(ConfigError, match="was 'vlm'; did you mean 'vllm'"):
        engines.make_engine(config("vlm"), seed=0)


def test_tensor_parallel_workers_receive_weights_each_for_itself():
    tensor_parallel = {"vllm": {"tensor_parallel_size": 4}}
    assert config("vllm", **tensor_parallel).generator.num_ranks == 4
    assert config("hf", **tensor_parallel).generator.num_ranks == 1
