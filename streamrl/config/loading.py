"""From a YAML file, the environment and `--set` to a `RunConfig` that knows where values came from.

    defaults  <  FILE.yaml  <  STREAMRL__SECTION__KEY=value  <  --set section.key=value

Invariant: a value is read by YAML 1.2 rules wherever it stands, so `3e-6` is a number and `on` a
string; a key that stands twice is refused. `streamrl.cli` calls `load_config`, and only it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from streamrl.config.run import RunConfig
from streamrl.config.section import explain
from streamrl.errors import ConfigError

ENVIRONMENT_PREFIX = "STREAMRL__"
PARENT_VARIABLE = "STREAMRL_PARENT_PID"


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration; `origins` maps "section.key" to where it was set, if it was."""

    config: RunConfig
    origins: Mapping[str, str]


@dataclass(frozen=True)
class _Setting:
    path: tuple[str, ...]
    value: Any
    origin: str


def load_config(
    path: Path | str,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """The configuration of the file, changed by the environment and by "section.key=value".

    Raises:
        ConfigError: unreadable, unknown or contradictory; one sentence per finding.
    """
    settings = [
        *_from_file(Path(path)),
        *_from_environment(os.environ if environment is None else environment),
        *(_from_override(text) for text in overrides),
    ]
    tree: dict[str, Any] = {}
    for setting in settings:
        tree = _with(tree, setting.path, setting.value, setting.origin)
    origins = {".".join(setting.path): setting.origin for setting in settings}
    try:
        return LoadedConfig(RunConfig.model_validate(tree), origins)
    except ValidationError as error:
        raise explain(error, RunConfig, origins) from error


def render(loaded: LoadedConfig) -> str:
    """The resolved configuration as YAML; behind each value, where it came from."""
    lines = list(_render(loaded.config.model_dump(mode="json"), (), loaded.origins))
    width = max(len(text) for text, _ in lines)
    return "".join(f"{text:<{width}}  {origin}".rstrip() + "\n" for text, origin in lines)


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration, as a file that `load_config` reads back to the same."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _render(
    value: Any, path: tuple[str, ...], origins: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    indent = "  " * len(path)
    for key, item in value.items():
        here = (*path, key)
        if isinstance(item, dict) and item:
            yield f"{indent}{key}:", ""
            yield from _render(item, here, origins)
        else:
            dumped = yaml.safe_dump(item, default_flow_style=True, width=10**9)
            shown = dumped.removesuffix("...\n").strip()
            yield f"{indent}{key}: {shown}", f"# {_origin_of(here, origins)}"


def _origin_of(path: tuple[str, ...], origins: Mapping[str, str]) -> str:
    for length in range(len(path), 0, -1):
        if origin := origins.get(".".join(path[:length])):
            return origin
    return "default"


def _from_file(path: Path) -> Iterator[_Setting]:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: must hold sections such as `run:` and `data:`")
    yield from _leaves(root, (), path)


def _leaves(node: yaml.MappingNode, path: tuple[str, ...], file: Path) -> Iterator[_Setting]:
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key = str(_construct(key_node))
        line = key_node.start_mark.line + 1
        here = (*path, key)
        if key in seen:
            raise ConfigError(f"{'.'.join(here)}: stands twice, the second time at {file}:{line}")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, here, file)
        else:
            yield _Setting(here, _construct(value_node), f"{file}:{line}")


def _from_environment(environment: Mapping[str, str]) -> Iterator[_Setting]:
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = tuple(name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__"))
            yield _Setting(path, _parse(environment[name], name), f"environment {name}")


def _from_override(text: str) -> _Setting:
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {text}: must look like section.key=value")
    return _Setting(path, _parse(value, f"--set {key}"), f"--set {key}")


def _with(
    tree: Mapping[str, Any], path: tuple[str, ...], value: Any, origin: str
) -> dict[str, Any]:
    """The tree with the value at the path; the tree given stays as it is."""
    key, *rest = path
    if not rest:
        return {**tree, key: value}
    below = tree.get(key)
    if below is None:
        below = {}
    if not isinstance(below, Mapping):
        raise ConfigError(f"{origin}: {key} is {below!r} and has no keys below it")
    return {**tree, key: _with(below, tuple(rest), value, origin)}


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{origin}: {text!r} is not YAML: {' '.join(str(error).split())}"
        ) from error


def _construct(node: yaml.Node) -> Any:
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: true and false alone are booleans, and 1e-6 is a number."""


_SCALARS = {
    "tag:yaml.org,2002:bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "tag:yaml.org,2002:int": (r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$",
        "-+0123456789.",
    ),
    "tag:yaml.org,2002:null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
}
_Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))
