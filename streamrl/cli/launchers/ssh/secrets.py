"""Keys and passwords of a run: where the hosts find them, and what the launcher puts there.

Invariant: they are made once for a run, stand in one folder of the run's own that its owner alone
can read, and are handed on by ssh only.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from streamrl.config import RunConfig
from streamrl.config.secrets import REDIS_PASSWORD
from streamrl.curve import make_keys
from streamrl.errors import ConfigError

_FOLDER, _PASSWORD = "keys", "redis"
_KEYS = ("server.public", "server.secret", "client.public", "client.secret")
_HANDED_ON = (REDIS_PASSWORD, "WANDB_API_KEY", "HF_TOKEN")


def with_keys(config: RunConfig) -> RunConfig:
    """The configuration for the hosts, which find keys and password in the run's folder."""
    folder = config.run.path / _FOLDER
    password = folder / _PASSWORD if config.buffer.password_file else None
    buffer = config.buffer.model_copy(update={"curve": folder, "password_file": password})
    return config.model_copy(update={"buffer": buffer})


def write_secrets(given: RunConfig) -> None:
    """Fill the folder of `with_keys`: with the keys that the configuration names, those that an
    earlier launch of the run has made, or new ones.

    Raises:
        ConfigError: a file that it names cannot be read.
    """
    folder, curve = given.run.path / _FOLDER, given.buffer.curve
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if given.buffer.password_file is not None:
        _copy(given.buffer.password_file, folder / _PASSWORD)
    if curve is not None and curve != folder:
        for name in _KEYS:
            _copy(curve / name, folder / name)
    elif not (folder / "server.secret").exists():
        make_keys(folder)


def handed_on(config: RunConfig) -> Mapping[str, str]:
    """Variables of this process that the processes of the hosts get too."""
    generator = config.generator
    of_servers = (generator.vllm.api_key_variable, generator.sglang.api_key_variable)
    names = (*_HANDED_ON, *of_servers)
    return {name: os.environ[name] for name in names if name and name in os.environ}


def _copy(source: Path, target: Path) -> None:
    if source == target:
        return
    try:
        content = source.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from error
    target.unlink(missing_ok=True)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
