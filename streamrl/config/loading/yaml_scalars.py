"""YAML as version 1.2 reads it: `3e-6` is a number, `on` is a string."""

import re
from typing import Any

import yaml

from streamrl.errors import ConfigError


def parse(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{origin}: {text!r} is not YAML: {' '.join(str(error).split())}"
        ) from error


def construct(node: yaml.Node) -> Any:
    loader = Loader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


class Loader(yaml.SafeLoader):
    """YAML 1.2 scalars: true and false alone are booleans, and 1e-6 is a number."""


class Dumper(yaml.SafeDumper):
    """Quotes a text that version 1.1 or 1.2 would read as something else."""


def dump(value: Any, **options: Any) -> str:
    """YAML that `parse` reads back to the same."""
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
