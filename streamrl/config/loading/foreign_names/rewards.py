"""The rewards named in another system's file, as ours.

Invariant: each is an equivalent reward, or code in a file that `streamrl check` reports as missing
by name; never a default.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from streamrl.config.loading.foreign_names import ForeignName, foreign_names
from streamrl.config.loading.foreign_names.values import Lookup, translate

Settings = dict[str, Any]
TO_BE_NAMED = "PATH.py:NAME"
_NAMING = re.compile(r"data\.rewards?\b(?!.* an entry reward_model, in kwargs)")
_DOTTED = re.compile(r"(?:\w+\.)+\w+")
_MODELS = {
    "reward_model.enable": "reward_model.model.path",
    "reward.reward_model.enable": "reward.reward_model.model_path",
}
"""verl's reward models, by the setting that enables them."""
_FIELDS = {
    "data.reward": "reward",
    "data.reward_kwargs": "kwargs",
    "data.rewards.name": "name",
    "data.rewards.weight": "weight",
    "data.rewards.data_source": "data_source",
}
"""Fields of an entry in `data.rewards`, by the setting of a single reward."""


def names_a_reward(name: ForeignName) -> bool:
    """Whether the key chooses the reward, rather than being an argument of a reward model."""
    return _NAMING.match(name.here) is not None


def rewards_of(
    values: Mapping[str, Any], system: str, lookup: Lookup
) -> tuple[Settings, list[str]]:
    """Our settings for a file with these values by dotted name, and the keys they come from; empty
    if the file names no reward."""
    match system:
        case "TRL":
            found = [*_of_trl(values, lookup)]
        case "verl":
            found = [*_of_verl(values)]
        case _:
            found = [*_of_roll(values, lookup)]
    keys = list(dict.fromkeys(key for _, of in found for key in of if key in values))
    entries = [{_FIELDS[k]: v for k, v in ours.items() if k in _FIELDS} for ours, _ in found]
    others = {k: v for ours, _ in found for k, v in ours.items() if k not in _FIELDS}
    if len(entries) == 1 and entries[0].keys() <= {"reward", "kwargs"}:
        return found[0][0], keys
    return ({"data.rewards": entries} if entries else {}) | others, keys


def _of_trl(values: Mapping[str, Any], lookup: Lookup) -> Iterator[tuple[Settings, list[str]]]:
    """TRL's functions, by name or as PACKAGE.FUNCTION, and models, each with a weight."""
    name = foreign_names("TRL")["reward_funcs"]
    rewards = [
        (key, str(entry).removeprefix("trl.rewards."))
        for key in ("reward_funcs", "reward_model_name_or_path")
        for entry in _listed(values.get(key))
    ]
    weights = _listed(values.get("reward_weights"))
    for (key, reward), weight in zip_longest(rewards, weights[: len(rewards)]):
        is_model = key != "reward_funcs" or "/" in reward
        ours = _model(reward) if is_model else translate(name, reward, lookup) or _code(reward)
        weighted = {} if weight is None else {"data.rewards.weight": weight}
        yield ours | weighted, [key, "reward_weights"]


def _of_verl(values: Mapping[str, Any]) -> Iterator[tuple[Settings, list[str]]]:
    """verl's function, otherwise its model; otherwise the reward manager that chooses by the source
    of a row."""
    for section in ("reward.custom_reward_function", "custom_reward_function"):
        if path := values.get(f"{section}.path"):
            function = values.get(f"{section}.name") or "compute_score"
            of = [key for key in values if key.startswith(f"{section}.reward_kwargs.")]
            kwargs = {f"data.reward_kwargs{k.partition('reward_kwargs')[2]}": values[k] for k in of}
            ours = {"data.reward": f"{path}:{function}", **kwargs}
            yield ours, [f"{section}.path", f"{section}.name", *of]
            return
    for switch, path in _MODELS.items():
        if values.get(switch):
            yield _model(values.get(path)), [switch, path]
            return


def _of_roll(values: Mapping[str, Any], lookup: Lookup) -> Iterator[tuple[Settings, list[str]]]:
    """ROLL's: one entry per domain, whose worker scores the rows with one of its tags."""
    name = foreign_names("ROLL")["rewards.*"]
    for key, worker in values.items():
        if re.fullmatch(r"rewards\.[^.]+\.worker_cls", key):
            domain = key.split(".")[1]
            ours = translate(name, worker, lookup) or _code(str(worker).rpartition(".")[2])
            tags = _listed(values.get(f"rewards.{domain}.tag_included"))
            rows = {"data.rewards.data_source": tags, "data.data_source_key": "tag"} if tags else {}
            own = {"data.rewards.name": domain, **rows}
            yield ours | own, [key, f"rewards.{domain}.tag_included"]


def _model(path: Any) -> Settings:
    kwargs = {"data.reward_kwargs": {"path": path}} if path else {}
    return {"data.reward": "reward_model", **kwargs}


def _code(name: str) -> Settings:
    """The file of a user's function `package.file.function`."""
    file, _, function = name.rpartition(".")
    is_path = _DOTTED.fullmatch(name) is not None
    path = f"{file.replace('.', '/')}.py" if is_path else "PATH.py"
    return {"data.reward": f"{path}:{function}" if function.isidentifier() else TO_BE_NAMED}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
