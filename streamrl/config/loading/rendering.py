"""The resolved configuration as text, for a person and for a file. `values_of` has every setting by
dotted name, to compare two configurations."""

from collections.abc import Iterator, Mapping
from typing import Any

from streamrl import __version__
from streamrl.config.algorithm.unused_settings import unused_settings
from streamrl.config.loading.load import WRITTEN_BY, LoadedConfig
from streamrl.config.loading.sources import dump
from streamrl.config.run_config import RunConfig
from streamrl.config.section import leaves


def values_of(config: RunConfig) -> Mapping[str, Any]:
    """All settings by dotted name, as JSON values; an empty section or a list is one value."""
    return dict(leaves(config.model_dump(mode="json")))


_DEFAULT = "default"
_WIDEST = 60  # Characters of a setting; the origin of a longer one stands right behind it.


def render(loaded: LoadedConfig, *, with_defaults: bool = True) -> str:
    """The resolved configuration as YAML, with the origin of each value behind it."""
    values = loaded.config.model_dump(mode="json")
    return rendered(
        values if with_defaults else _without_defaults(values, (), loaded.origins), loaded.origins
    )


def _without_defaults(
    values: Mapping[str, Any], path: tuple[str, ...], origins: Mapping[str, str]
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, item in values.items():
        here = (*path, key)
        if isinstance(item, dict) and item:
            if inner := _without_defaults(item, here, origins):
                kept[key] = inner
        elif _origin_of(here, origins) != _DEFAULT:
            kept[key] = [_without_nulls(one) for one in item] if isinstance(item, list) else item
    return kept


def _without_nulls(item: Any) -> Any:
    """The settings of a record in a list, without origins; null is omitted as the default."""
    if not isinstance(item, dict):
        return item
    return {key: value for key, value in item.items() if value is not None}


def rendered(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """`render` for some settings."""
    lines = list(_render(values, (), origins))
    width = max((len(text) for text, _ in lines if len(text) <= _WIDEST), default=0)
    return "".join(f"{text:<{width}}  {origin}".rstrip() + "\n" for text, origin in lines)


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as a file that `load_config` reads back to the same: without
    settings that have no effect, which would be refused. The first line names the release."""
    values = config.model_dump(mode="json")
    for section, name, _ in unused_settings(config.algorithm, config.learner.num_updates):
        algorithm = values["algorithm"]
        if algorithm[section][name] is None:
            continue
        kept = {key: value for key, value in algorithm[section].items() if key != name}
        values = {**values, "algorithm": {**algorithm, section: kept}}
    return f"{WRITTEN_BY} {__version__}\n{dump(values, allow_unicode=True)}"


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
            yield f"{indent}{key}: {on_one_line(item)}", f"# {_origin_of(here, origins)}"


def on_one_line(value: Any) -> str:
    """The value as YAML."""
    return dump(value, default_flow_style=True, width=10**9).removesuffix("...\n").strip()


def _origin_of(path: tuple[str, ...], origins: Mapping[str, str]) -> str:
    for length in range(len(path), 0, -1):
        if origin := origins.get(".".join(path[:length])):
            return origin
    return _DEFAULT
