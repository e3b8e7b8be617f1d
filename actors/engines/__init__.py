"""Inference engines behind one interface.

A new engine implements `streamrl.interfaces.Engine` (`UpdatableEngine` takes the steps of an update
that are common), passes `tests/contract/test_engines.py`, and gets a case in `find_engine`.
"""

from importlib.util import find_spec
from pkgutil import resolve_name

from streamrl.config import RunConfig
from streamrl.config.generator import GeneratorSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.interfaces import Engine


def make_engine(config: RunConfig, *, seed: int, is_shared: bool = False) -> Engine:
    """The engine that `generator.engine` names, with its weights loaded; call it in the event loop.

    `seed` is for sampling and differs between a run's generators. With `is_shared`, an engine on
    servers elsewhere shares them with other generators of the run, and has no weights until the
    learner sends some.
    """
    make = resolve_name(find_engine(config.generator))
    engine: Engine = make(config, seed=seed, is_shared=is_shared)
    return engine


def find_engine(generator: GeneratorSettings) -> str:
    """MODULE:NAME of the function that makes the engine `generator.engine` names; imports nothing.

    Raises:
        ConfigError: there is no such engine, it is not installed, or its server's key is missing.
    """
    match generator.engine:
        case "hf":
            return "actors.engines.hf.engine:HfEngine.from_config"
        case "sglang":
            if generator.sglang.url is None:
                _require_installed("sglang")
            _ = generator.sglang.api_key
            return "actors.engines.sglang.server:open_sglang"
        case "vllm" if generator.vllm.url:
            _ = generator.vllm.api_key
            return "actors.engines.vllm.server:open_vllm"
        case "vllm":
            _require_installed("vllm")
            return "actors.engines.vllm.engine:VllmEngine"
        case name:
            allowed = ["hf", "sglang", "vllm"]
            raise ConfigError(f"generator.engine: was {name!r}; {did_you_mean(name, allowed)}")


_HOW_TO_INSTALL = {
    "vllm": "vLLM is not installed here; on a GPU machine pip install 'streamrl[vllm]', on a CPU "
    "`make .venv-vllm/vllm.stamp` and start the generator with .venv-vllm/bin/streamrl",
    "sglang": "SGLang is not installed here; on a GPU machine pip install 'streamrl[sglang]', on a "
    "CPU `make .venv-sglang/sglang.stamp` and start the generator with .venv-sglang/bin/streamrl; "
    "or start its server elsewhere and name it in generator.sglang.url",
}


def _require_installed(library: str) -> None:
    if find_spec(library) is None:
        raise ConfigError(f"generator.engine {library}: {_HOW_TO_INSTALL[library]}")


def require_torchvision(path: str) -> None:
    """Raise ConfigError if what vLLM's own processors of images need is not installed."""
    if find_spec("torchvision") is None:
        raise ConfigError(
            f"generator.engine: vllm needs torchvision for the images that {path} sees, and it is "
            "not installed: use generator.engine hf"
        )
