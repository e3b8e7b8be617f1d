"""Every setting of a configuration by its dotted name, to compare two of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.config.run_config import RunConfig


def values_of(config: RunConfig) -> Mapping[str, Any]:
    """As JSON has them; an empty section or a list is one value."""
    return dict(_leaves(config.model_dump(mode="json"), ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
