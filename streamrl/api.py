"""Runs from Python: `streamrl.train` starts the same daemons as `streamrl launch`.

    import streamrl

    run = streamrl.train("config.yaml", reward=score, dataset=rows)
    print(run.metrics()[-1]["reward/mean"], run.checkpoint)

Its arguments become settings: rows become a file, a function becomes PATH.py:NAME. Files written
for this are named after their content and never change, so a resumed run finds what it was started
with.

Invariant: the run is the same as from the command line, in its own processes: it has the same
folder, configuration file and exit codes, and every command works on it. A thread reads what the
launch prints. When this process ends, the launch can no longer print and ends too, with its
daemons.
"""

import hashlib
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from streamrl.checkpoints.find import newest
from streamrl.cli.processes.command import executable
from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.loading.explain import RESOLVED_FILE
from streamrl.config.loading.sources import dump
from streamrl.data_files import as_json_values
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError, ErrorPipe, ErrorRecord, error_of, sentence_of
from streamrl.extras import missing
from streamrl.run_folder import read_evaluation
from streamrl.tracking.jsonl import METRICS_FILE, read_after, read_metrics

_POLL_S = 0.2
_KEPT_LINES = 200


class Run:
    """A run that `streamrl.train` started."""

    def __init__(
        self, config: RunConfig, arguments: Sequence[str], file: Path, *, show: bool
    ) -> None:
        """Start `streamrl launch FILE` with these arguments."""
        self.config = config
        # The mark of the run that the launch will move aside.
        self._replaced = _stamp(config.run.path) if "--new" in arguments else None
        self._pipe = ErrorPipe()
        self._process = subprocess.Popen(
            [executable(), "launch", str(file), "--no-view", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, **self._pipe.environment},
            pass_fds=(self._pipe.descriptor,),
        )
        self._record: ErrorRecord | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._read_output, args=(show,), daemon=True)
        self._reader.start()

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.config.run.path

    @property
    def exit_code(self) -> int | None:
        """The exit code of the launch; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """The last lines that the launch printed."""
        return "".join(self._lines)

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete checkpoint; None if there is none."""
        found = newest(self.path) if self._has_begun else None
        return None if found is None else found.path

    @property
    def evaluation(self) -> dict[str, Any]:
        """The result of the final evaluation (`run.evaluate`); {} before that."""
        return read_evaluation(self.path) if self._has_begun else {}

    def metrics(self) -> list[dict[str, Any]]:
        """A row per step so far, with the names of `metrics.jsonl`, as for `pandas.DataFrame`."""
        return read_metrics(self.path / METRICS_FILE) if self._has_begun else []

    def follow(self) -> Iterator[dict[str, Any]]:
        """Yield each step's row as it comes. Waits for the next row, or for the end of the run."""
        last = -1
        while True:
            is_over = self.exit_code is not None
            for row in read_after(self.path / METRICS_FILE, last) if self._has_begun else ():
                last = row["step"]
                yield row
            if is_over:
                return
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float | None = None) -> "Run":
        """Wait for the end of the run; an interrupt stops the run and is raised again.

        Raises:
            StreamRLError: the run failed; the error has the class and sentence of the failure.
            TimeoutError: it has not ended after `timeout_s`.
        """
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.path} has not ended after {timeout_s:g} s") from error
        except KeyboardInterrupt:
            self.stop()
            raise
        self._reader.join()
        # -SIGTERM comes from a launch that did not yet handle signals.
        if code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise error_of(code, f"launch: {sentence_of(code, self._record)}")
        return self

    def stop(self, timeout_s: float | None = None) -> "Run":
        """Stop the run, which first saves a checkpoint, and wait for its end.
        `train(..., resume=True)` resumes it."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def __repr__(self) -> str:
        state = "runs" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        return f"<Run {self.path}: {state}>"

    @property
    def _has_begun(self) -> bool:
        """Whether the folder is already this run's, not that of the run which it replaces."""
        return self._replaced is None or _stamp(self.path) != self._replaced

    def _read_output(self, show: bool) -> None:
        """Read lines until the launch closes its output."""
        assert self._process.stdout is not None, "it is a pipe"
        with self._pipe, self._process.stdout as output:
            for line in output:
                self._lines.append(line)
                if show:
                    # An output that is closed, missing or cannot encode must not end the run.
                    with suppress(Exception):
                        sys.stdout.write(line)
            self._record = self._pipe.read()


def _stamp(folder: Path) -> int | None:
    """A mark of the run in the folder, which changes when a launch writes its configuration; None
    without a run."""
    try:
        return (folder / RESOLVED_FILE).stat().st_mtime_ns
    except OSError:
        return None


Rows = Iterable[Mapping[str, Any]]

_LOADER = '''"""A function that was given to streamrl.train, as cloudpickle keeps it."""

from pathlib import Path

import cloudpickle

{name} = cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


def function_setting(function: Callable[..., Any] | str, folder: Path) -> str:
    """The reward as PATH.py:NAME, for the daemons, which are other processes.

    A function in a module is named by its file. A local function, or one from a notebook or the
    running script (which must not run again), is pickled into the folder.

    Raises:
        ConfigError: it is neither a function nor a name, or it cannot be pickled.
    """
    if isinstance(function, str):
        return function
    if not callable(function):
        raise ConfigError(
            f"reward: was {type(function).__name__}; it must be a function or PATH.py:NAME"
        )
    module = inspect.getmodule(function)
    name, file = getattr(function, "__qualname__", ""), getattr(module, "__file__", None)
    if file is not None and getattr(module, "__name__", "") != "__main__" and name.isidentifier():
        return f"{Path(file).resolve()}:{name}"
    return _kept_by_value(function, folder)


def dataset_setting(argument: str, dataset: Rows | str | Path, folder: Path) -> str:
    """The path of a dataset: the given one, or that of a new JSONL file with its rows.

    Raises:
        ConfigError: a row is not a mapping or cannot be JSON, or there are no rows.
    """
    if isinstance(dataset, str | Path):
        return str(dataset)
    lines = []
    for number, row in enumerate(dataset):
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"{argument}: row {number} was {type(row).__name__}; it must be a mapping"
            )
        try:
            lines.append(json.dumps(as_json_values(row), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{argument}: row {number} is no JSON: {error}") from error
    if not lines:
        raise ConfigError(f"{argument}: has no rows")
    data = "".join(f"{line}\n" for line in lines).encode()
    return str(_written(folder, data, ".jsonl"))


def _kept_by_value(function: Callable[..., Any], folder: Path) -> str:
    try:
        import cloudpickle
    except ImportError as error:
        what = "reward: a function of a notebook or of the script itself, not of a file,"
        raise missing(what, error) from error
    try:
        data: bytes = cloudpickle.dumps(function)
    except (pickle.PicklingError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"reward: {function!r} cannot be kept: {error}") from error
    path = _written(folder, data, ".pkl")
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() else "function"
    write_file(path.with_suffix(".py"), _LOADER.format(name=name))
    return f"{path.with_suffix('.py')}:{name}"


def _written(folder: Path, data: bytes, suffix: str, *, is_private: bool = False) -> Path:
    # The name of a Python module must begin with a letter.
    path = folder.resolve() / f"input_{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, data, is_private=is_private)
    return path


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
        settings: further settings by name, such as {"learner.optimizer.lr": 1e-6}.
        resume: resume the run in the folder.
        new: move a run in the folder aside.
        strict: end at the first failure of a daemon instead of restarting it.
        wait: return when the run has ended; otherwise at once.
        show: print the progress.

    Raises:
        ConfigError: the configuration cannot be used.
        StreamRLError: with `wait`, if the run failed; the error has the class of the failure.
    """
    if resume and new:
        raise ConfigError("resume and new exclude each other: go on with the run, or start another")
    overrides = _overrides(settings or {})
    with _file_of(config) as given:
        named = _named(given, overrides, reward=reward, dataset=dataset, eval_dataset=eval_dataset)
        overrides = [*overrides, *_overrides(named)]
        loaded = load_config(given, overrides).config
        is_file = isinstance(config, str | Path)
        file = given
        if not is_file:
            # It may contain a password.
            data = given.read_bytes()
            file = _written(_inputs(loaded), data, ".yaml", is_private=True)
    mode = ["--resume"] if resume else ["--new"] if new else []
    mode += ["--strict"] if strict else []
    run = Run(loaded, [*mode, *(f"--set={o}" for o in overrides)], file, show=show)
    return run.wait() if wait else run


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    try:
        return [f"{name}={json.dumps(v, default=os.fspath)}" for name, v in settings.items()]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"settings: what is no setting's value: {error}") from error


def _named(
    file: Path,
    overrides: list[str],
    *,
    reward: Callable[..., Any] | str | None,
    dataset: Rows | str | Path | None,
    eval_dataset: Rows | str | Path | None,
) -> dict[str, str]:
    """The settings for the given arguments; files for them are written beside the runs."""
    # With a dataset, a configuration without a source of prompts is complete.
    known = [*overrides, 'data.source=""'] if dataset is not None else overrides
    folder = _inputs(load_config(file, known).config)
    named: dict[str, str] = {}
    if reward is not None:
        named |= {"data.reward": function_setting(reward, folder)}
    for argument, setting, rows in (
        ("dataset", "data.source", dataset),
        ("eval_dataset", "data.eval_source", eval_dataset),
    ):
        if rows is not None:
            named |= {setting: dataset_setting(argument, rows, folder)}
    return named


def _inputs(config: RunConfig) -> Path:
    """The folder for such files, beside the run folders."""
    return config.run.folder / "inputs"


@contextmanager
def _file_of(config: str | Path | Mapping[str, Any] | RunConfig) -> Iterator[Path]:
    """The configuration as a YAML file; a temporary one exists for the block."""
    match config:
        case str() | Path():
            yield Path(config)
            return
        case RunConfig():
            text = to_yaml(config)
        case Mapping():
            try:
                text = dump(dict(config))
            except yaml.YAMLError as error:
                raise ConfigError(f"config: holds what YAML cannot: {error}") from error
        case _:
            raise ConfigError(
                f"config: was {type(config).__name__}; it must be a path, a mapping or a RunConfig"
            )
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        try:
            yield Path(file.name)
        except ConfigError as error:
            place = re.compile(rf" \({re.escape(file.name)}:\d+\)")
            raise ConfigError(place.sub("", str(error))) from error
