"""From a YAML file, the environment and `--set` to a `RunConfig` that knows where values came from.

    defaults < FILE.yaml < STREAMRL__SECTION__KEY=value < --set section.key=value

Invariant: values are read by YAML 1.2 rules in every source, so `3e-6` is a number and `on` a
string; duplicate keys are refused. A preset replaces what earlier sources say about its choices;
settings in its own source override it. `run.total_epochs` is resolved to a number of steps, so the
length of a loaded configuration is in `run.max_steps` alone, and a daemon needs no data to know
when the run ends.
"""

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from streamrl import __version__
from streamrl.config.algorithm.settings import CHOICES, AlgorithmSettings
from streamrl.config.data import DataSettings
from streamrl.config.learner import LearnerSettings
from streamrl.config.loading.explain import RESOLVED_FILE, explain, is_at
from streamrl.config.loading.sources import Setting, from_environment, from_file, from_override
from streamrl.config.run import RunSettings
from streamrl.config.run_config import SECTIONS_ALONE, RunConfig, require_consistent
from streamrl.config.secrets import hand_down, without_secrets
from streamrl.config.section import overlaid
from streamrl.data_files import SUFFIXES, count_rows, has_rows
from streamrl.errors import ConfigError
from streamrl.findings import SETTING

_FIELD, _RESOLVED = "run.total_epochs", "run.max_steps"
WRITTEN_BY = "# StreamRL"
"""Start of a comment line above a run's configuration; the release follows."""
_NOT_GIVEN = {"model": {"path": "(not given)"}, "data": {"source": "(not given)"}}
Place: TypeAlias = tuple[int | str, ...]
"""The keys that lead to a setting."""
# What the policy reads.
_READ = frozenset({"system_prompt", "prompt_template", "template", "content", "instructions"})


def with_steps(
    tree: dict[str, Any], origins: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings and their origins with `run.total_epochs` replaced by `run.max_steps`; unchanged
    if a section is refused, since its validation says why.

    Raises:
        ConfigError: `data.source` is not a readable file, or has too few rows for a step.
    """
    try:
        run = RunSettings.model_validate(tree.get("run", {}))
        if run.total_epochs is None:
            return tree, origins
        data = DataSettings.model_validate(tree.get("data"))
        num_groups = LearnerSettings.model_validate(tree.get("learner", {})).groups_per_step
    except ValidationError:
        return tree, origins
    num_rows = _count(run.total_epochs, data)
    num_steps = int(num_rows * run.total_epochs) // num_groups
    counted = f"{_FIELD} {run.total_epochs:g} of {num_rows} rows"
    if num_steps < 1:
        raise ConfigError(
            f"{counted} is less than a step of learner.groups_per_step {num_groups} prompts"
        )
    where = {_FIELD: f"{run.total_epochs:g} epochs are in {_RESOLVED} ({origins.get(_FIELD, '')})"}
    if "max_steps" in run.model_fields_set and run.max_steps <= num_steps:
        num_steps = run.max_steps
    else:
        where = {**where, _RESOLVED: f"{counted}, {num_groups} a step"}
    length = {"max_steps": num_steps, "total_epochs": None}
    return {**tree, "run": {**tree["run"], **length}}, {**origins, **where}


def _count(total_epochs: float, data: DataSettings) -> int:
    for source in data.sources:
        if not has_rows(source.path):
            raise ConfigError(
                f"{_FIELD}: was {total_epochs:g}, and data.source {source.path} has no end; only "
                f"the rows of a file ({', '.join(SUFFIXES)}) or of a data set are counted: set "
                f"{_RESOLVED}"
            )
    return sum(
        count_rows("data.source", source.path, subset=source.subset, split=source.split)
        for source in data.sources
    )


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration; `origins` maps "section.key" to where it was set, if it was."""

    config: RunConfig
    origins: Mapping[str, str]


def load_config(
    path: Path | str,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """The configuration of the file, overridden by the environment and by "section.key=value".

    Raises:
        ConfigError: it is unreadable, unknown or contradictory; one sentence per finding, without
            passwords.
    """
    loaded, refusal = load_usable(path, overrides, environment)
    if refusal is not None:
        raise refusal
    return loaded


def load_usable(
    path: Path | str,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[LoadedConfig, ConfigError | None]:
    """`load_config` for a check that continues after errors: the refusals, and the configuration
    without them. Refused settings have their defaults there, so findings about them are about no
    value that was given.

    Raises:
        ConfigError: the file, a variable or an override cannot be read, or too little is left.
    """
    try:
        sources = [
            [*from_file(Path(path))],
            [*from_environment(os.environ if environment is None else environment)],
            [*map(from_override, overrides)],
        ]
        settings = reduce(_over, sources)
        tree: dict[str, Any] = reduce(with_setting, settings, {})
        tree = _at_home(tree)
    except ConfigError as error:
        raise ConfigError(_without_secrets(error, path)) from None
    origins = {".".join(setting.path): setting.origin for setting in settings}
    try:
        tree, origins = with_steps(tree, origins)
        return LoadedConfig(RunConfig.model_validate(tree), origins), None
    except ConfigError as error:
        refusal = error
        refused: list[Place] = [("run", "total_epochs")]
    except ValidationError as error:
        refusal = ConfigError(
            _without_secrets(explain(error, RunConfig, origins), path) + _of_other_release(path)
        )
        refused = _places(error)
    if (rest := _usable(tree, refused)) is None:
        raise refusal
    return LoadedConfig(rest, origins), refusal


def contradictions_beside(loaded: LoadedConfig, refusal: ConfigError) -> list[str]:
    """The sentences about settings that were not refused, independently of the stand-ins for
    refused ones."""
    try:
        require_consistent(loaded.config)
    except ValidationError as error:
        sentences = str(explain(error, RunConfig, loaded.origins)).splitlines()
        return [s for s in sentences if not is_of_a_stand_in(s, refusal, loaded.origins)]
    return []


def is_of_a_stand_in(sentence: str, refusal: ConfigError, origins: Mapping[str, str]) -> bool:
    """Whether the sentence may be about a stand-in for a refused value: it names a setting that was
    not given, in a section with a refused key. A preset of the algorithm decides the values of
    other settings, and an environment decides which are read."""
    refused = [line.partition(": ")[0] for line in str(refusal).splitlines()]
    sections = {name.partition(".")[0] for name in refused}
    for name in SETTING.findall(sentence):
        section = name.partition(".")[0]
        is_given = any(is_at(key, name) for key in origins)
        is_refused = any(is_at(one, name) for one in refused)
        is_sound = is_given and not is_refused and section != "algorithm"
        if section in sections and not is_sound:
            return True
    return "environments" in sections and "environment" in sentence


def _of_other_release(path: Path | str) -> str:
    """A further line if a run's configuration is refused and was written by another release; one
    without a release is older than this line."""
    file = Path(path) / RESOLVED_FILE if Path(path).is_dir() else Path(path)
    if file.name != RESOLVED_FILE or not (file.parent / "metrics.jsonl").exists():
        return ""
    with suppress(ConfigError, ValidationError):
        tree: dict[str, Any] = reduce(with_setting, from_file(file), {})
        RunConfig.model_validate(with_steps(_at_home(tree), {})[0])
        # What is refused was given beside the file.
        return ""
    found = re.search(rf"^{WRITTEN_BY} (\S+)$", file.read_text(encoding="utf-8-sig"), re.MULTILINE)
    if found and found[1] == __version__:
        return ""
    writer = f"StreamRL {found[1]}" if found else "an earlier release"
    return (
        f"\n{file} was written by {writer}, and this is StreamRL {__version__}: change there what "
        "is refused, or go on with that release"
    )


def _at_home(value: Any) -> Any:
    """The value with ~ expanded, which a shell leaves in `--set run.folder=~/runs` and other
    systems have in files; texts that the policy reads stay as they are."""
    match value:
        case Mapping():
            return {k: item if k in _READ else _at_home(item) for k, item in value.items()}
        case list():
            return [_at_home(item) for item in value]
        case str() if value.startswith("~/"):
            return os.path.expanduser(value)
    return value


def _over(below: Sequence[Setting], source: Sequence[Setting]) -> list[Setting]:
    """The settings of both; a preset named by the source replaces the choices of earlier
    sources."""
    if any(setting.path == ("algorithm", "preset") and setting.value for setting in source):
        choices = {("algorithm", name) for name in CHOICES}
        below = [setting for setting in below if setting.path[:2] not in choices]
    return [*below, *source]


def _without_secrets(error: ConfigError, path: Path | str) -> str:
    """The sentence with the file's path unchanged, which may contain an @."""
    file = str(Path(path))
    return file.join(map(without_secrets, str(error).split(file)))


def _places(error: ValidationError) -> list[Place]:
    return [detail["loc"] for detail in error.errors()]


def _usable(tree: Mapping[str, Any], refused: Sequence[Place]) -> RunConfig | None:
    """The configuration without what was refused, with contradictions unchecked. Required settings
    that are missing have the value of _NOT_GIVEN. None if it cannot be made."""
    rest = overlaid(_NOT_GIVEN, reduce(_without, refused, tree))
    try:
        return RunConfig.model_validate(rest, context=SECTIONS_ALONE)
    except ValidationError as error:
        smaller = reduce(_without, _places(error), rest)
        return None if smaller == rest else _usable(smaller, ())


def _without(tree: Mapping[str, Any], path: Place) -> Mapping[str, Any]:
    """The tree without the value at the path, or without the last existing part of the path."""
    if not path or str(path[0]) not in tree:
        return tree
    key, *below = str(path[0]), *path[1:]
    inner = tree[key]
    if isinstance(inner, Mapping) and below and below[0] in inner:
        return {**tree, key: _without(inner, tuple(below))}
    return {name: value for name, value in tree.items() if name != key}


def with_setting(tree: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """A copy of the tree with the setting's value. Raises ConfigError if a value is where the
    setting has a section."""
    key, *rest = setting.path
    if not rest:
        return {**tree, key: setting.value}
    below = {} if (there := tree.get(key)) is None else there
    if not isinstance(below, Mapping):
        raise ConfigError(f"{setting.origin}: {key} is {below!r} and has no keys below it")
    return {**tree, key: with_setting(below, replace(setting, path=tuple(rest)))}


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A run's configuration overridden by "section.key=value". Values equal to the default count as
    not given, so another choice (an advantage, a loss, a preset) comes with its own settings; a
    named preset replaces everything that presets set.

    Raises:
        ConfigError: an override is unknown or contradicts the rest.
    """
    settings = [from_override(text) for text in overrides]
    given = _given(config.algorithm)
    if any(setting.path == ("algorithm", "preset") for setting in settings):
        given = {name: value for name, value in given.items() if name not in CHOICES}
    tree = {**config.model_dump(mode="json"), "algorithm": given}
    tree = _at_home(reduce(with_setting, settings, tree))
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        origins = {".".join(setting.path): setting.origin for setting in settings}
        raise explain(error, RunConfig, origins) from error


def _given(algorithm: AlgorithmSettings) -> Mapping[str, Any]:
    """The smallest settings that give the same section beside the preset, the choices and their
    defaults."""
    choices = {"advantage": algorithm.advantage, "loss": algorithm.loss}
    of_preset, of_choices = (
        AlgorithmSettings.model_validate({"preset": algorithm.preset, **more}).model_dump(
            mode="json"
        )
        for more in ({}, choices)
    )
    values = {
        name: value if name == "rollout_is" else _beyond(value, of_choices[name])
        for name, value in algorithm.model_dump(mode="json").items()
        if value != of_choices[name]
    }
    chosen = {name: value for name, value in choices.items() if value != of_preset[name]}
    return {"preset": algorithm.preset, **chosen, **values}


def _beyond(value: Any, default: Any) -> Any:
    """The keys of a section whose values differ from the default's."""
    if not isinstance(value, Mapping) or not isinstance(default, Mapping):
        return value
    return {
        key: _beyond(item, default.get(key))
        for key, item in value.items()
        if key not in default or item != default[key]
    }


def configuration(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration that the command was given as an argument or an option. Raise ConfigError
    if there is none, more than one, or it cannot be used."""
    loaded = load_config(config_file(arguments), arguments.overrides)
    hand_down(arguments, loaded.config.buffer.password_of_url)
    return loaded


def config_file(arguments: argparse.Namespace) -> str:
    """The configuration file that the command was given."""
    given: list[str] = [path for path in (arguments.file, arguments.config) if path]
    if len(given) != 1:
        raise ConfigError("give one configuration file, as CONFIG or --config CONFIG")
    return given[0]
