"""Inference engines behind one interface.

A new engine implements `streamrl.interfaces.Engine` (`UpdatableEngine` takes the steps of an update
that are common), passes `tests/contract/test_engines.py`, and gets a case in `find_engine`.
"""

from collections.abc import Callable
from importlib.util import find_spec

from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Engine

MakeEngine = Callable[[RunConfig, int, bool], Engine]


def make_engine(config: RunConfig, *, seed: int, is_shared: bool = False) -> Engine:
    """The engine that `generator.engine` names, with its weights loaded; call it in the event loop.

    `seed` is the seed of sampling, another one for each generator of a run. With `is_shared` an
    engine on servers elsewhere shares them with other generators of the run, and has no weights
    before the learner has sent some.
    """
    return find_engine(config.generator)(config, seed, is_shared)


def find_engine(generator: GeneratorSettings) -> MakeEngine:
    """What makes the engine that `generator.engine` names; nothing is imported before it is called.

    Raises:
        ConfigError: there is no such engine, it is not installed, or its server's key is missing.
    """
    match generator.engine:
        case "hf":
            return _make_hf
        case "sglang":
            if generator.sglang.url is None:
                _require_sglang()
            _ = generator.sglang.api_key
            return _make_sglang
        case "vllm" if generator.vllm.url:
            _ = generator.vllm.api_key
            return _open_vllm
        case "vllm":
            _require_vllm()
            return _make_vllm
        case name:
            allowed = ["hf", "sglang", "vllm"]
            raise ConfigError(f"generator.engine: was {name!r}; {did_you_mean(name, allowed)}")


def _make_hf(config: RunConfig, seed: int, is_shared: bool) -> Engine:
    from actors.engines.hf.engine import HfEngine

    return HfEngine.from_config(config, seed=seed)


def _make_sglang(config: RunConfig, seed: int, is_shared: bool) -> Engine:
    from actors.engines.sglang.server import open_sglang

    return open_sglang(config, seed=seed, is_shared=is_shared)


def _open_vllm(config: RunConfig, seed: int, is_shared: bool) -> Engine:
    from actors.engines.vllm.server import open_vllm

    return open_vllm(config, is_shared=is_shared)


def _make_vllm(config: RunConfig, seed: int, is_shared: bool) -> Engine:
    from actors.engines.vllm.engine import VllmEngine

    return VllmEngine.from_config(config, seed=seed)


def _require_vllm() -> None:
    if find_spec("vllm") is None:
        raise ConfigError(
            "generator.engine vllm: vLLM is not installed here; on a GPU machine "
            "pip install 'streamrl[vllm]', on a CPU `make .venv-vllm/vllm.stamp` and start the "
            "generator with .venv-vllm/bin/streamrl"
        )


def require_torchvision(path: str) -> None:
    """What vLLM's own processors of images need.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("torchvision") is None:
        raise ConfigError(
            f"generator.engine: vllm needs torchvision for the images that {path} sees, and it is "
            "not installed: use generator.engine hf"
        )


def _require_sglang() -> None:
    if find_spec("sglang") is None:
        raise ConfigError(
            "generator.engine sglang: SGLang is not installed here; it needs another torch: "
            "start its server from an environment without StreamRL and name it in "
            "generator.sglang.url, or start the generator from an environment with both: on a GPU "
            "machine one as docs/engines.md makes it, on a CPU `make .venv-sglang/sglang.stamp` "
            "and .venv-sglang/bin/streamrl"
        )
