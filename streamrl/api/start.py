"""`streamrl.train`: a run from a script or a notebook."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from streamrl.api.inputs import Rows, dataset_setting, function_setting
from streamrl.api.run import Run
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.errors import ConfigError


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    *,
    reward: Callable[..., Any] | str | None = None,
    dataset: Rows | str | Path | None = None,
    eval_dataset: Rows | str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    new: bool = False,
    strict: bool = False,
    wait: bool = True,
    show: bool = True,
) -> Run:
    """Start a run on this machine, as `streamrl launch` does.

    Args:
        config: a YAML file, the sections as a mapping, or a `RunConfig`.
        reward: `data.reward`: a function, a built-in name or PATH.py:NAME.
        dataset: `data.source`: rows (mappings, such as those of a `datasets.Dataset`), a file or a
            name.
        eval_dataset: `data.eval_source`, likewise.
        settings: further ones by name, such as {"learner.optimizer.lr": 1e-6}.
        resume: go on with the run in the folder.
        new: move a run that is in the folder aside.
        strict: end at the first failure of a daemon, instead of starting it again.
        wait: return when the run has ended; otherwise at once.
        show: print the progress.

    Raises:
        ConfigError: the configuration cannot be used.
        StreamRLError: `wait`, and the run has failed; of the failure's kind.
    """
    if resume and new:
        raise ConfigError("resume and new exclude each other: go on with the run, or start another")
    with _file_of(config) as file:
        overrides = [f"{name}={json.dumps(value)}" for name, value in (settings or {}).items()]
        named = _named(file, overrides, reward=reward, dataset=dataset, eval_dataset=eval_dataset)
        overrides = [*overrides, *(f"{name}={json.dumps(value)}" for name, value in named.items())]
        loaded = load_config(file, overrides).config
        mode = ["--resume"] if resume else ["--new"] if new else []
        mode += ["--strict"] if strict else []
        run = Run.start(loaded, [*mode, *(f"--set={o}" for o in overrides)], file, show=show)
    return run.wait() if wait else run


def _named(
    file: Path,
    overrides: list[str],
    *,
    reward: Callable[..., Any] | str | None,
    dataset: Rows | str | Path | None,
    eval_dataset: Rows | str | Path | None,
) -> dict[str, str]:
    """The settings of the arguments that are given; what has to be written is, beside the runs."""
    # A configuration that names no source of prompts is complete with the dataset alone.
    known = [*overrides, 'data.source=""'] if dataset is not None else overrides
    folder = load_config(file, known).config.run.folder / "inputs"
    named: dict[str, str] = {}
    if reward is not None:
        named |= {"data.reward": function_setting("reward", reward, folder)}
    for argument, rows in (("dataset", dataset), ("eval_dataset", eval_dataset)):
        if rows is not None:
            setting = {"dataset": "data.source", "eval_dataset": "data.eval_source"}[argument]
            named |= {setting: dataset_setting(argument, rows, folder)}
    return named


@contextmanager
def _file_of(config: str | Path | Mapping[str, Any] | RunConfig) -> Iterator[Path]:
    """A YAML file of it, for as long as a launch needs to read it."""
    match config:
        case str() | Path():
            yield Path(config)
            return
        case RunConfig():
            text = to_yaml(config)
        case Mapping():
            text = yaml.safe_dump(dict(config))
        case _:
            raise ConfigError(
                f"config: was {type(config).__name__}; it must be a path, a mapping or a RunConfig"
            )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write(text)
    yield Path(file.name)
