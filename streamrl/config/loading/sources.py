"""Where settings come from: a YAML file, the environment, and `--set`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from streamrl.config.loading.similar import RESOLVED_FILE, similar_file, similar_run
from streamrl.config.loading.yaml_scalars import Loader, construct, parse
from streamrl.errors import ConfigError

ENVIRONMENT_PREFIX = "STREAMRL__"
PARENT_VARIABLE = "STREAMRL_PARENT_PID"


@dataclass(frozen=True)
class Setting:
    path: tuple[str, ...]
    value: Any
    origin: str


def from_file(path: Path) -> Iterator[Setting]:
    """Of the file; of a run's folder those of its config.yaml."""
    path = path / RESOLVED_FILE if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=Loader)
    except OSError as error:
        hint = "" if path.exists() else similar_file(path) or similar_run(path)
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: must hold sections such as `run:` and `data:`")
    yield from _leaves(root, (), path)


def _leaves(node: yaml.MappingNode, path: tuple[str, ...], file: Path) -> Iterator[Setting]:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(construct(key_node))
        line = key_node.start_mark.line + 1
        here = (*path, key)
        if key in seen:
            raise ConfigError(f"{'.'.join(here)}: stands twice, the second time at {file}:{line}")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, here, file)
        else:
            yield Setting(here, construct(value_node), f"{file}:{line}")


def from_environment(environment: Mapping[str, str]) -> Iterator[Setting]:
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            yield Setting(path, parse(environment[name], name), f"environment {name}")


def from_override(text: str) -> Setting:
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {text}: must look like section.key=value")
    return Setting(path, parse(value, f"--set {key}"), f"--set {key}")
