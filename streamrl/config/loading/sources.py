"""The sources of settings: a YAML file, the environment, and `--set`. YAML is read as version 1.2:
`3e-6` is a number, `on` is a string."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from streamrl.config.loading.explain import RESOLVED_FILE, similar_file, similar_run
from streamrl.errors import ConfigError


def parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin}: {text!r} is not YAML: {fault(error)}") from error


def fault(error: Exception) -> str:
    """One line about invalid YAML or text: where, what, and in which context."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    begins = f", which begins in line {error.context_mark.line + 1}" if error.context_mark else ""
    within = f" ({error.context}{begins})" if error.context else ""
    return f"line {error.problem_mark.line + 1}: {error.problem}{within}"


class Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: only true and false are booleans, and 1e-6 is a number. Values that contain
    themselves and duplicate keys are refused."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        # One that is still being read has no end.
        if node is not None and node.end_mark is None:
            problem = "the alias stands inside of what it names"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # In a file `_leaves` sees the sections; this is for what stands in lists and in --set.
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                problem = f"{key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as something else."""


Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def dump(value: Any, **options: Any) -> str:
    """YAML that `parse` reads back to the same value."""
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, **options))


_SCALARS = {
    "tag:yaml.org,2002:bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "tag:yaml.org,2002:int": (r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$",
        "-+0123456789.",
    ),
    "tag:yaml.org,2002:null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
}
Loader.yaml_implicit_resolvers = {}
for _tag, (_pattern, _first) in _SCALARS.items():
    Loader.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))
    # Beside those of version 1.1, which other readers go by.
    Dumper.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))


ENVIRONMENT_PREFIX = "STREAMRL__"


@dataclass(frozen=True)
class Setting:
    path: tuple[str, ...]
    value: Any
    origin: str


def from_file(path: Path) -> Iterator[Setting]:
    """The settings in the file, or in config.yaml of a run folder."""
    path = path / RESOLVED_FILE if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=Loader)
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: must hold sections such as `run:` and `data:`")
        yield from _leaves(root, (), path)
    except OSError as error:
        hint = "" if path.exists() else similar_file(path) or similar_run(path)
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
    # Of a tag that is unknown, or a value that is none of its tag's, nothing is made.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not YAML: {fault(error)}") from error


def _leaves(node: yaml.MappingNode, path: tuple[str, ...], file: Path) -> Iterator[Setting]:
    seen: set[str] = set()
    loader = Loader("")
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        line = key_node.start_mark.line + 1
        here = (*path, key)
        if key == "<<":
            raise ConfigError(
                f"{file}:{line}: YAML 1.2 merges no mappings by <<: write the keys out"
            )
        if key in seen:
            raise ConfigError(f"{'.'.join(here)}: stands twice, the second time at {file}:{line}")
        seen.add(key)
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _leaves(value_node, here, file)
        else:
            value = loader.construct_object(value_node, deep=True)
            yield Setting(here, value, f"{file}:{line}")


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
