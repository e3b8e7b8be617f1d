"""Runs from Python: `streamrl.train` starts the daemons that `streamrl launch` starts.

    import streamrl

    run = streamrl.train("config.yaml", reward=score, dataset=rows)
    print(run.metrics()[-1]["reward/mean"], run.checkpoint)

What it is given becomes settings: rows a file, a function PATH.py:NAME. A file that is written is
named after its content and never changes, so a run that resumes finds what it was started with.

Invariant: the run is that of the command line, in processes of its own: its folder, its
configuration file and its exit codes are the same, and every command works on it. A thread reads
what the launch prints. The launch ends with this process, since it cannot print any more, and its
daemons end with it.
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
from streamrl.run_folder import read_json
from streamrl.tracking.jsonl import METRICS_FILE, read_after, read_metrics

_POLL_S = 0.2
_KEPT_LINES = 200


class Run:
    """Made by `streamrl.train`."""

    def __init__(
        self, config: RunConfig, arguments: Sequence[str], file: Path, *, show: bool
    ) -> None:
        """`streamrl launch FILE` with these arguments."""
        self.config = config
        # Of the run that the launch moves aside.
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
        """The run's folder."""
        return self.config.run.path

    @property
    def exit_code(self) -> int | None:
        """Of the launch; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """The last lines that the launch printed."""
        return "".join(self._lines)

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete one."""
        found = newest(self.path) if self._has_begun else None
        return None if found is None else found.path

    @property
    def evaluation(self) -> dict[str, Any]:
        """What `run.evaluate` has found; {} before that."""
        return read_json(self.path / "evaluation.json") if self._has_begun else {}

    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step so far, by the names of `metrics.jsonl`; `pandas.DataFrame` takes
        it."""
        return read_metrics(self.path / METRICS_FILE) if self._has_begun else []

    def follow(self) -> Iterator[dict[str, Any]]:
        """Each step's row as it comes. Waits for the next one; the run's end unblocks."""
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
        """Waits for the run's end; an interrupt stops the run, and is raised again.

        Raises:
            StreamRLError: the run failed; of the failure's kind, with its sentence.
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
        # The latter before the launch has begun to listen to signals.
        if code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
            raise error_of(code, f"launch: {sentence_of(code, self._record)}")
        return self

    def stop(self, timeout_s: float | None = None) -> "Run":
        """Stop the run, which saves a checkpoint first; `train(..., resume=True)` goes on with it.
        Waits for its end."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def __repr__(self) -> str:
        state = "runs" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        return f"<Run {self.path}: {state}>"

    @property
    def _has_begun(self) -> bool:
        """Whether the folder is this run's, and no longer that of the one which it replaces."""
        return self._replaced is None or _stamp(self.path) != self._replaced

    def _read_output(self, show: bool) -> None:
        """Until the launch has closed it; waits for the next line."""
        assert self._process.stdout is not None, "it is a pipe"
        with self._pipe, self._process.stdout as output:
            for line in output:
                self._lines.append(line)
                if show:
                    # One that is closed, lacks a character or is none at all must not end the run.
                    with suppress(Exception):
                        sys.stdout.write(line)
            self._record = self._pipe.read()


def _stamp(folder: Path) -> int | None:
    """Of the run in the folder: a launch writes its configuration anew. None without a run."""
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
    """PATH.py:NAME of the reward, for the daemons, which are other processes.

    A function of a module is named where it stands. One of a notebook or of the script itself,
    which must not be run again, or a local one, is kept by value in the folder.

    Raises:
        ConfigError: it is neither a function nor a name, or it cannot be kept.
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
    """The path of a dataset: as it is given, or of a new JSONL file of its rows.

    Raises:
        ConfigError: a row is no mapping, or holds what JSON cannot; or there is none.
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
    # A module's name begins with a letter.
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
    overrides = _overrides(settings or {})
    with _file_of(config) as given:
        named = _named(given, overrides, reward=reward, dataset=dataset, eval_dataset=eval_dataset)
        overrides = [*overrides, *_overrides(named)]
        loaded = load_config(given, overrides).config
        is_file = isinstance(config, str | Path)
        file = given
        if not is_file:
            # It may have a password in it.
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
    """The settings of the arguments that are given; what has to be written is, beside the runs."""
    # A configuration that names no source of prompts is complete with the dataset alone.
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
    """The folder of what is written for runs, beside them."""
    return config.run.folder / "inputs"


@contextmanager
def _file_of(config: str | Path | Mapping[str, Any] | RunConfig) -> Iterator[Path]:
    """A YAML file of it; one that is written is there for the block."""
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
