"""Settings that exist, but elsewhere: `learner.lr` stands at `learner.optimizer.lr`."""

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import BaseModel

_MAX_PLACES = 3
# Without their section these could be anything.
_GENERIC = frozenset({"name", "path", "kind", "mode", "level", "coef", "every", "url", "method"})


def sections_at(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that a field may hold, also inside `X | None`, and the records of a choice."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        yield from (record for one in annotation.__subclasses__() for record in sections_at(one))
    for argument in getattr(annotation, "__args__", ()):
        yield from sections_at(argument)


@cache
def all_paths(model: type[BaseModel]) -> tuple[str, ...]:
    """Every dotted name below the model, sections among them, each once."""
    return tuple(dict.fromkeys(_paths(model, "")))


def own_places(model: type[BaseModel], path: str) -> tuple[str, ...]:
    """Where the setting stands that was probably meant; () if nowhere or in too many places.

    Those that end as `path` does, with as many of its parts as there are; of these the ones in its
    own section, if it is one of ours.

    >>> from streamrl.config import RunConfig
    >>> own_places(RunConfig, "learner.lr"), own_places(RunConfig, "learner.temperature")
    (('learner.optimizer.lr',), ('generator.temperature',))
    """
    parts = path.split(".")
    for start in range(len(parts)):
        suffix = ".".join(parts[start:])
        found = [p for p in all_paths(model) if p.endswith(f".{suffix}") and p != path]
        near = [p for p in found if p.startswith(f"{parts[0]}.")]
        is_clear = bool(near) or suffix not in _GENERIC
        if found and is_clear:
            places = tuple(near or found)
            return places if len(places) <= _MAX_PLACES else ()
    return ()


def close_places(model: type[BaseModel], key: str) -> tuple[str, ...]:
    """Where a setting of a like name stands; for a key that stands in no section."""
    leaves = {path.rpartition(".")[2]: path for path in reversed(all_paths(model)) if "." in path}
    return tuple(leaves[leaf] for leaf in get_close_matches(key, leaves, n=1, cutoff=0.8))


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in sections_at(field.annotation):
            yield from _paths(section, f"{prefix}{name}.")
