"""The typed settings of `generator.vllm` reach vLLM's own arguments."""

import os
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from actors.engines.model import ModelFacts
from actors.engines.vllm import arguments as vllm_arguments
from actors.engines.vllm.arguments import engine_arguments
from streamrl.config import RunConfig
from streamrl.config.generator import VllmSettings

GIVEN = {
    "gpu_memory_utilization": 0.35,
    "max_num_batched_tokens": 640,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "load_format": "dummy",
    "kv_cache_memory_bytes": 2**20,
}


def test_every_setting_is_an_argument_of_vllms_engine():
    ours = VllmSettings.model_fields.keys() - VllmSettings.ours
    assert ours - AsyncEngineArgs.__dataclass_fields__.keys() == set()
    assert ours - GIVEN.keys() == {"tensor_parallel_size"}


def test_what_is_set_is_what_vllm_gets():
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"source": "copy"},
            "generator": {"engine": "vllm", "vllm": GIVEN, "engine_kwargs": {"block_size": 32}},
        }
    )
    facts = ModelFacts(shapes={}, eos=frozenset([1]), vocab_size=64, head_width=64)
    arguments = engine_arguments(config, facts, seed=3)
    assert {name: getattr(arguments, name) for name in GIVEN} == GIVEN
    assert arguments.block_size == 32


def test_a_float32_head_stands_beside_overrides_of_ones_own():
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"source": "copy"},
            "generator": {
                "engine": "vllm",
                "dtype": "bfloat16",
                "lm_head_dtype": "float32",
                "engine_kwargs": {"hf_overrides": {"rope_theta": 1e5}},
            },
        }
    )
    facts = ModelFacts(shapes={}, eos=frozenset([1]), vocab_size=64, head_width=64)
    arguments = engine_arguments(config, facts, seed=3)
    assert arguments.hf_overrides == {"head_dtype": "float32", "rope_theta": 1e5}


@pytest.mark.parametrize(("given", "expected"), [(None, "spawn"), ("fork", "fork")])
def test_on_a_gpu_its_processes_do_not_inherit_what_this_one_knows_of_gpus(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
):
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(vllm_arguments, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"source": "copy"}, "generator": {"engine": "vllm"}}
    )
    engine_arguments(config, ModelFacts({}, eos=frozenset([1]), vocab_size=64), seed=3)
    assert os.environ[name] == expected
