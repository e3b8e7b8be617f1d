"""Which engine a configuration gets, and the error if it cannot have it."""

from pathlib import Path

import pytest

from actors import engines
from actors.engines.model import ModelFacts, require_all_sent
from actors.engines.vllm.server import serve_command
from streamrl.config import RunConfig, load_config
from streamrl.config.model import ModelSettings
from streamrl.errors import ConfigError
from streamrl.placement.seats import devices_per_engine
from tests.model_families import make_model


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


def test_a_missing_sglang_says_what_else_there_is(monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"SGLang is not installed here; .*sglang\.url"):
        engines.make_engine(config("sglang"), seed=0)


@pytest.mark.parametrize(("name", "meant"), [("vlm", "vllm"), ("sglan", "sglang"), ("hff", "hf")])
def test_an_unknown_engine_is_named(name, meant):
    with pytest.raises(ConfigError, match=f"was '{name}'; did you mean '{meant}'"):
        engines.make_engine(config(name), seed=0)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        ({"vllm": {"url": "node:8000"}}, "must be http://host:port"),
        (
            {"vllm": {"url": "http://node:8000", "enforce_eager": True}},
            "enforce_eager: is chosen where the server of vllm.url is started",
        ),
        (
            {"sglang": {"url": "http://node:8000", "mem_fraction_static": 0.8}},
            "mem_fraction_static: is chosen where the server of sglang.url is started",
        ),
        ({"vllm": {"api_key_env": "KEY"}}, "is of a server elsewhere; set url"),
        (
            {"vllm": {"url": "http://node:8000"}, "engine_kwargs": {"seed": 1}},
            "does not get to see",
        ),
    ],
)
def test_settings_that_a_server_elsewhere_would_not_see_are_refused(generator, message):
    with pytest.raises(ValueError, match=message):
        config("vllm", **generator)


def test_a_server_elsewhere_may_be_said_to_be_as_it_is():
    server = {"url": "http://node:8000", "tensor_parallel_size": 2, "pause_mode": "abort"}
    assert config("vllm", vllm=server).generator.num_ranks == 2
    server = {"url": "http://node:8000", "tp_size": 2, "recompute_kv": True}
    assert config("sglang", sglang=server).generator.num_ranks == 1


def test_workers_of_one_engine_receive_weights_each_for_itself():
    tensor_parallel = {"vllm": {"tensor_parallel_size": 4}}
    assert config("vllm", **tensor_parallel).generator.num_ranks == 4
    sizes = {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 3}
    more = config("vllm", **tensor_parallel, engine_kwargs=sizes).generator
    assert more.num_ranks == devices_per_engine(more) == 24
    assert config("hf", **tensor_parallel).generator.num_ranks == 1


def test_sglangs_ranks_are_those_of_its_tensor_parallel_size():
    of_attention = {"dp_size": 2, "enable_dp_attention": True}
    accepted = config("sglang", sglang={"tp_size": 4}, engine_kwargs=of_attention).generator
    assert devices_per_engine(accepted) == 4
    for name in ("dp_size", "data_parallel_size", "pp_size", "pipeline_parallel_size"):
        with pytest.raises(ValueError, match=rf"engine_kwargs\.{name}: was 2, .*tp_size alone"):
            config("sglang", engine_kwargs={name: 2})
    for name in ("tp_size", "tensor_parallel_size"):
        with pytest.raises(ValueError, match=rf"{name}: .* set generator\.sglang\.tp_size"):
            config("sglang", engine_kwargs={name: 2})
    own = {"engine": "sglang", "engine_kwargs": {"dp_size": 2}}
    with pytest.raises(ValueError, match=r"validation\.generator\.engine_kwargs\.dp_size: was 2"):
        RunConfig.model_validate(
            {
                "model": {"path": "nowhere"},
                "data": {"source": "copy"},
                "validation": {"every": 5, "generator": own},
            }
        )


@pytest.mark.parametrize(("family", "is_refused"), [("DeepSeek-V3", True), ("Qwen3", False)])
def test_an_engine_without_weights_has_to_get_all_of_them(family, is_refused, tmp_path):
    make_model(family).save_pretrained(tmp_path)
    facts = ModelFacts.of(ModelSettings(path=str(tmp_path)))
    dummy = config("vllm", vllm={"load_format": "dummy"}).generator
    require_all_sent(config("vllm").generator, facts)
    if is_refused:
        with pytest.raises(ConfigError, match=r"load_format: was dummy.*e_score_correction_bias"):
            require_all_sent(dummy, facts)
    else:
        require_all_sent(dummy, facts)


def test_the_documents_show_the_command_that_starts_a_vllm_elsewhere():
    root = Path(__file__).parents[2]
    lines = (root / "docs" / "engines.md").read_text().splitlines()
    (shown,) = (line for line in lines if " vllm serve " in line)
    shipped = load_config(root / "configs" / "engines" / "vllm_url.yaml", environment={}).config
    assert serve_command(shipped).replace(shipped.model.path, "MODEL") == shown


def test_a_key_comes_from_the_environment_alone(monkeypatch):
    server = config("vllm", vllm={"url": "http://node:8000", "api_key_env": "A_KEY"})
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(ConfigError, match="there is no A_KEY in the environment"):
        engines.make_engine(server, seed=0)
    monkeypatch.setenv("A_KEY", "")
    with pytest.raises(ConfigError, match="or it is empty"):
        engines.make_engine(server, seed=0)
    monkeypatch.setenv("A_KEY", "secret")
    assert server.generator.vllm.api_key == "secret"
    assert "secret" not in server.model_dump_json()
