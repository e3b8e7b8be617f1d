"""Inference engines behind one interface.

A new engine implements `streamrl.interfaces.Engine` (`UpdatableEngine` takes the steps of an update
that are common), passes `tests/contract/test_engines.py`, and gets a case in `make_engine`.
"""

from importlib.util import find_spec

from streamrl.config import RunConfig
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Engine


def make_engine(config: RunConfig, *, seed: int) -> Engine:
    """The engine that `generator.engine` names, with its weights loaded; call it in the event loop.

    `seed` is the seed of sampling, another one for each generator of a run.
    """
    match config.generator.engine:
        case "hf":
            from actors.engines.hf.engine import HfEngine

            return HfEngine.from_config(config, seed=seed)
        case "sglang":
            if config.generator.sglang.url is None:
                _require_sglang()
            from actors.engines.sglang.start import open_sglang

            return open_sglang(config, seed=seed)
        case "vllm" if config.generator.vllm.url:
            from actors.engines.vllm.start import open_vllm

            return open_vllm(config)
        case "vllm":
            _require_vllm()
            from actors.engines.vllm.engine import VllmEngine

            return VllmEngine.from_config(config, seed=seed)
        case name:
            allowed = ["hf", "sglang", "vllm"]
            raise ConfigError(f"generator.engine: was {name!r}; {did_you_mean(name, allowed)}")


def _require_vllm() -> None:
    if find_spec("vllm") is None:
        raise ConfigError(
            "generator.engine vllm: vLLM is not installed here; on a GPU machine "
            "`pip install streamrl[vllm]`, on a CPU `make .venv-vllm/vllm.stamp` and start the "
            "generator with .venv-vllm/bin/streamrl"
        )


def _require_sglang() -> None:
    if find_spec("sglang") is None:
        raise ConfigError(
            "generator.engine sglang: SGLang is not installed here; on a GPU machine "
            "`pip install streamrl[sglang]`, or name a server elsewhere in generator.sglang.url"
        )
