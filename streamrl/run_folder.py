"""The run folder, which a launch prepares and every command reads.

runs/NAME/  config.yaml  data.json  metrics.jsonl  trained.jsonl  books.json  learner.json
            parity.json  launch.json  mirror.json  restarts.jsonl  evaluation.json  report.html
            checkpoints/  abandoned/  buffer/  logs/ROLE.log  weights/  parity/  quarantine/
            record/  replay/

buffer/     journal.sqlite  payloads/
"""

import atexit
import json
import logging
import math
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from streamrl.config import RunConfig, load_config, to_yaml
from streamrl.config.addresses import bound_socket, host_of, port_of, url_host
from streamrl.config.environments import SourceRows, first_difference, reading_of, rows_of
from streamrl.config.loading.explain import RESOLVED_FILE, other_runs
from streamrl.durable_files import write_file
from streamrl.errors import ConfigError
from streamrl.types import Books, BufferStats, LearnerStatus

log = logging.getLogger(__name__)

LEARNER_FILE = "learner.json"
BOOKS_FILE = "books.json"
RESTARTS_FILE = "restarts.jsonl"
DATA_FILE = "data.json"
LAUNCH_FILE = "launch.json"
MIRROR_FILE = "mirror.json"
EVALUATION_FILE = "evaluation.json"
PAGE_FILE = "report.html"
_TARGETS = ".prometheus"
# What a run without a step leaves that can be resumed.
_STATES = ("checkpoints", "buffer")

R = TypeVar("R")


class Rows(Struct, frozen=True):
    """What a run reads from this prompt on. `sources` has only rows that this machine can read.
    `reading` is a digest of the settings that apply; `checked_on` is the host on which the launch
    made a prompt from every row, or "" (another host may lack the rows' images and videos)."""

    first_prompt_index: int
    sources: tuple[SourceRows, ...]
    reading: str = ""
    checked_on: str = ""

    def num_passes(self, prompt_index: int) -> float:
        """Passes over the rows of all sources together before this prompt; NaN without rows."""
        num_rows = sum(source.num_rows for source in self.sources)
        return (prompt_index - self.first_prompt_index) / num_rows if num_rows else math.nan


class Launch(Struct, frozen=True):
    """The newest launch of a run: the options that say where it runs, when it ended (Unix time),
    and why if it failed."""

    options: tuple[str, ...] = ()
    ended_s: float | None = None
    failure: str = ""


class MirrorStatus(Struct, frozen=True):
    """When the whole run was last copied to its mirror (Unix time; None: never), and why the last
    attempt failed."""

    url: str
    whole_s: float | None = None
    failure: str = ""


def prepare(
    config: RunConfig,
    *,
    resume: bool,
    new: bool,
    binds: bool = True,
    are_rows_checked: bool = False,
    next_prompt_index: Callable[[Path], int] = lambda _: 0,
) -> RunConfig:
    """Complete the configuration and write it to the run folder: free ports for those given as 0,
    the prompt from which its rows are read, and `validation.every` if a validator starts by
    default, so that the learner waits for it.

    Args:
        binds: buffer and learner run on this machine; otherwise a plan assigns the ports.
        are_rows_checked: this launch has checked the rows, so the generators need not.
        next_prompt_index: the first prompt that the run in a folder has not yet requested.

    Raises:
        ConfigError: the folder already holds a run and neither flag says what to do with it, the
            prompts differ from those of the run to resume, or the daemons could not reach each
            other. The folder is then unchanged.
    """
    folder = config.run.path
    has_run = held_run(folder)
    if has_run and not (resume or new):
        raise ConfigError(has_run)
    now = _rows_now(config, are_rows_checked)
    rows = _continued(config, now, next_prompt_index) if has_run and resume else (now,)
    if resume and not has_run and not any((folder / name).exists() for name in _STATES):
        elsewhere = "" if binds else ", unless its hosts hold it"
        print(
            f"run.name: {folder} holds no run: --resume starts a new one{elsewhere}",
            file=sys.stderr,
        )
    config = config.with_values(data={"first_prompt_index": rows[-1].first_prompt_index})
    resolved = _bound_here(config) if binds else config
    try:
        # Killed daemons are still listed there.
        for target in config.run.folder.glob(f"{_TARGETS}/{config.run.name}@*.json"):
            target.unlink(missing_ok=True)
        if has_run and not resume:
            move_aside(folder)
        if not resume:
            # It is from a launch that ended before its first step.
            shutil.rmtree(folder / "buffer", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAUNCH_FILE).unlink(missing_ok=True)
        write_file(folder / DATA_FILE, msgspec.json.encode(rows).decode() + "\n")
        write_file(folder / RESOLVED_FILE, to_yaml(resolved))
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write {folder}: {error.strerror}") from error
    return resolved


def move_aside(folder: Path) -> None:
    """Rename the folder to NAME.TIME, and print that. If the name is taken, a number is added,
    since the move would otherwise go into that folder."""
    name = f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}"
    aside, number = folder.with_name(name), 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{name}-{number}")
    shutil.move(folder, aside)
    print(f"run.name: the run that {folder} held is in {aside} now", file=sys.stderr)


def held_run(folder: Path) -> str:
    """Why a launch without flags is refused; "" if the folder has no trained step."""
    if not (folder / "metrics.jsonl").exists():
        return ""
    return (
        f"run.name: {folder} holds a run already: --resume goes on with it, --new moves it aside, "
        "or choose another run.name"
    )


def _continued(
    config: RunConfig, now: Rows, next_prompt_index: Callable[[Path], int]
) -> tuple[Rows, ...]:
    """What the run in the folder has read so far, and if it differs, what it reads now. Within a
    run a prompt index always means the same prompt, unless an epoch with other rows begins."""
    folder = config.run.path
    known = read_rows(folder)
    difference = _other_setting(config, folder) or _other_rows(known, now, folder)
    if difference is None:
        if not known:
            return (now,)
        then = replace(known[-1], reading=now.reading, checked_on=now.checked_on)
        return (*known[:-1], then)
    sentence, remedy = difference
    if "data." not in sentence.partition(":")[0]:
        raise ConfigError(f"{sentence}: {remedy}, or start anew with --new")
    if config.data.changed == "refuse":
        raise ConfigError(
            f"{sentence}: {remedy}, set data.changed: allow to begin an epoch of what there is "
            "now, or start anew with --new"
        )
    return (*known, replace(now, first_prompt_index=next_prompt_index(folder)))


def _other_setting(config: RunConfig, folder: Path) -> tuple[str, str] | None:
    """A setting that gives other prompts than before, and how to undo that."""
    if not (folder / RESOLVED_FILE).is_file():
        return None
    difference = first_difference(
        load_config(folder / RESOLVED_FILE, environment={}).config, config
    )
    if difference is None:
        return None
    name, then, now = difference
    sentence = f"{name}: was {now}, and the run in {folder} has {then}"
    return sentence, "set it back to go on with its prompts"


def _other_rows(known: tuple[Rows, ...], now: Rows, folder: Path) -> tuple[str, str] | None:
    """The first source that has other rows than before, and how to undo that."""
    for then, source in zip(known[-1].sources if known else (), now.sources, strict=False):
        if (then.num_rows, then.sha256) != (source.num_rows, source.sha256):
            count = "as many" if then.num_rows == source.num_rows else str(then.num_rows)
            sentence = (
                f"{source.setting}: {source.path} has {source.num_rows} rows, and the run in "
                f"{folder} read {count} others, so that it would train some twice and some never"
            )
            return sentence, "put them back"
    return None


def _rows_now(config: RunConfig, are_checked: bool) -> Rows:
    """What the run reads now; no sources if one cannot be read, since a check has refused it or it
    is on other machines."""
    sources: tuple[SourceRows, ...] = ()
    with suppress(ConfigError):
        sources = rows_of(config)
    checked_on = socket.gethostname() if are_checked else ""
    return Rows(config.data.first_prompt_index, sources, reading_of(config), checked_on)


def are_rows_checked(config: RunConfig) -> bool:
    """Whether the launch of this run has made a prompt, on this host, from every row that a daemon
    reads. Reads all files.

    Raises:
        ConfigError: a file has other rows than at the launch, so processes of the run would have
            different prompts at one index.
    """
    launched = next(reversed(read_rows(config.run.path)), None)
    if launched is None or not launched.sources or launched.reading != reading_of(config):
        return False
    now = rows_of(config)
    for then, source in zip(launched.sources, now, strict=False):
        # Each machine makes its own files of a hub data set.
        is_other = then.num_rows != source.num_rows or not source.path.startswith("datasets:")
        if then != source and is_other:
            raise ConfigError(
                f"{source.setting}: {source.path} ({source.num_rows} rows) is not the file that "
                f"the launch of the run in {config.run.path} read ({then.num_rows} rows): put that "
                "back, or stop the run and go on with `streamrl launch --resume`"
            )
    return launched.checked_on == socket.gethostname() and launched.sources == now


def read_rows(folder: Path) -> tuple[Rows, ...]:
    """What the run has read, in the order of its prompts; () if its release recorded nothing."""
    return _record(folder / DATA_FILE, tuple[Rows, ...]) or ()


def target_file(runs: Path, name: str, daemon_id: str) -> Path:
    """The file from which Prometheus reads the address of a daemon's metrics; no id has an @."""
    return runs / _TARGETS / f"{name}@{daemon_id}.json"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none or it is damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _record(path: Path, kind: type[R]) -> R | None:
    """The record in a file; None if it is missing, damaged, or from another release."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def note_launch(folder: Path, launch: Launch) -> None:
    """Write the record of the launch to the run folder."""
    with suppress(OSError):
        write_file(folder / LAUNCH_FILE, msgspec.json.encode(launch).decode() + "\n")


def read_mirror(folder: Path) -> MirrorStatus | None:
    """The state of the mirror; None if nothing was ever copied."""
    return _record(folder / MIRROR_FILE, MirrorStatus)


def read_evaluation(folder: Path) -> dict[str, Any]:
    """The result of the final evaluation; {} before that."""
    return read_json(folder / EVALUATION_FILE)


def read_launch(folder: Path) -> Launch:
    """The record of the newest launch; an empty one if daemons were started one by one."""
    return _record(folder / LAUNCH_FILE, Launch) or Launch()


def resume_command(folder: Path) -> str:
    """The command that resumes the run where it ran."""
    options = (*read_launch(folder).options, "--resume", *_place(folder))
    return shlex.join(("streamrl", "launch", str(folder / RESOLVED_FILE), *options))


def _place(folder: Path) -> tuple[str, ...]:
    """The options that name the run folder, if its configuration names another one because it was
    moved or is seen from elsewhere."""
    try:
        run = load_config(folder / RESOLVED_FILE, environment={}).config.run
    except ConfigError:
        return ()
    is_elsewhere = run.folder.resolve() != folder.parent.resolve()
    # Without quotes YAML would read some names as numbers.
    place = ("--set", f"run.folder={json.dumps(str(folder.parent))}") if is_elsewhere else ()
    if run.name == folder.name:
        return place
    return (*place, "--set", f"run.name={json.dumps(folder.name)}")


def require_own_folder(config: RunConfig, file: Path) -> None:
    """Check that a command which resumes the run of this file would resume that run.

    Raises:
        ConfigError: the run was moved or copied, or its relative path is from another working
            folder, so another run would be resumed or started.
    """
    folder, path = file.absolute().parent, config.run.path
    is_of_a_run = file.name == RESOLVED_FILE and (folder / "metrics.jsonl").exists()
    if not is_of_a_run or folder.resolve() == path.resolve():
        return
    try:
        own = load_config(file, environment={}).config.run
    except ConfigError:
        return
    means_this = path.resolve().parent == folder.resolve().parent and config.run.name == own.name
    if means_this or path.resolve() == own.path.resolve():
        raise ConfigError(
            f"run.folder: {file} lies in the folder of a run and means {path.absolute()}; "
            f"{shlex.join(_place(folder))} goes on with the run where it lies"
        )


def note_restart(folder: Path, role: str, exit_code: int, sentence: str) -> None:
    """Record that a launch restarts a process, and why the process ended."""
    line = {"time_s": time.time(), "role": role, "exit_code": exit_code, "sentence": sentence}
    with suppress(OSError), (folder / RESTARTS_FILE).open("a", encoding="utf-8") as file:
        print(json.dumps(line), file=file)


def read_restarts(folder: Path) -> dict[str, list[str]]:
    """Why each process of the run was restarted, by its name, in order of time."""
    restarts: dict[str, list[str]] = {}
    with suppress(OSError):
        for line in (folder / RESTARTS_FILE).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                restarts.setdefault(str(record["role"]), []).append(str(record["sentence"]))
    return restarts


def read_learner(folder: Path) -> LearnerStatus | None:
    """The learner's last report; None if there is none, or another release wrote it."""
    return _record(folder / LEARNER_FILE, LearnerStatus)


def ended_launch(folder: Path) -> Launch | None:
    """The newest launch, if it has ended and no learner was started by hand since."""
    launch, learner = read_launch(folder), read_learner(folder)
    has_ended = launch.ended_s is not None and (learner is None or learner.time_s < launch.ended_s)
    return launch if has_ended else None


def is_launched_since(folder: Path, time_s: float) -> bool:
    """Whether a launch has begun after this Unix time; each launch writes the configuration."""
    age_s = launched_s(folder)
    return age_s is not None and time.time() - age_s > time_s


def launched_s(folder: Path) -> float | None:
    """Seconds since the newest launch began; None if there was none."""
    try:
        return max(0.0, time.time() - (folder / RESOLVED_FILE).stat().st_mtime)
    except OSError:
        return None


def config_of(folder: Path) -> RunConfig:
    """The configuration of the run in this folder.

    Its `run.path` is this folder, even if the folder was moved or is seen from elsewhere.

    Raises:
        ConfigError: there is no such run, or its configuration cannot be read.
    """
    path = folder / RESOLVED_FILE
    if not path.is_file():
        raise ConfigError(f"{_no_run(folder)}{other_runs(folder)}")
    config = load_config(path, environment={}).config
    named = folder if folder.name else folder.resolve()
    return config.with_values(run={"folder": named.parent, "name": named.name})


def find_config(target: str) -> RunConfig:
    """The configuration of the run that a command names by its folder, a file in it, or a
    configuration file.

    It is the one in the run folder if that exists, since a launch writes the ports there.
    """
    path = Path(target)
    if path.is_dir() or not (path.exists() or path.suffix):
        return config_of(path)
    if path.exists():
        # Any other YAML file in a run folder is a separate configuration.
        may_be_deeper = path.suffix not in (".yaml", ".yml")
        folders = path.absolute().parents if may_be_deeper else [path.parent]
        for folder in folders if may_be_deeper or path.name == RESOLVED_FILE else ():
            if (folder / RESOLVED_FILE).is_file() and _holds_a_run(folder):
                return config_of(folder)
    config = load_config(path).config
    return config_of(config.run.path) if (config.run.path / RESOLVED_FILE).exists() else config


def find_run(target: str) -> RunConfig:
    """`find_config` for a run that has a folder; all of its files are below `run.path`."""
    config = find_config(target)
    require_run(config)
    return config


def require_run(config: RunConfig) -> None:
    """Raise ConfigError if the run of this configuration has no folder."""
    folder = config.run.path
    if not (folder / RESOLVED_FILE).is_file():
        raise ConfigError(f"run.name: {_no_run(folder)}{other_runs(folder)}")


def _holds_a_run(folder: Path) -> bool:
    """Whether a daemon has written there; config.yaml alone does not prove that."""
    return any((folder / name).exists() for name in ("logs", "metrics.jsonl", LEARNER_FILE))


def _no_run(folder: Path) -> str:
    if folder.is_dir():
        return f"{folder} is no run folder: it has no config.yaml"
    return f"{folder} is no run folder: {'it is a file' if folder.exists() else 'there is none'}"


def last_log_line(log_file: Path) -> str:
    """The last non-blank line of a log, or a sentence that there is none."""
    try:
        lines = log_file.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"cannot read {log_file}: {error.strerror}"
    stripped = (line.strip() for line in reversed(lines))
    return next((line for line in stripped if line), f"{log_file} is empty")


def write_books(config: RunConfig, stats: BufferStats) -> None:
    """Write the books in these stats to `books.json`, without the list of open prompts."""
    books = msgspec.to_builtins(stats.books, str_keys=True)
    kept = {key: value for key, value in books.items() if key != "open_ranges"}
    path = config.run.path / BOOKS_FILE
    log.info("books: %s", kept)
    try:
        write_file(path, json.dumps({**kept, "balanced": stats.books.balanced}, indent=1) + "\n")
    except OSError as error:
        # The journal has them, so an ending buffer need not fail because the disk is full.
        log.warning("%s cannot be written: %s", path, error)


def read_books(folder: Path) -> Books | None:
    """The books written by the last buffer that ended; None if there are none, or another release
    wrote them."""
    return _record(folder / BOOKS_FILE, Books)


def _bound_here(config: RunConfig) -> RunConfig:
    """The configuration with free ports of this machine, and with `validation.every` set if a
    validator starts by default."""
    buffer, weights = config.buffer, config.weights
    if config.is_validated and config.validation.every is None:
        config = config.with_values(validation={"every": "auto"})
    # Both ports are held until both are known, or the second could be the first again.
    with ExitStack() as held:
        url = _bound("buffer.url", buffer.url, held) if buffer.binds_url else buffer.url
        address = _bound("weights.address", weights.address, held)
        if sys.platform == "linux":
            # On Linux a daemon can listen at a port that is bound here. Keeping it bound until this
            # process ends keeps other launches from picking it between restarts of the daemon.
            atexit.register(held.pop_all().close)
    return config.with_values(buffer={"url": url}, weights={"address": address})


def _bound(name: str, url: str, held: ExitStack) -> str:
    """The URL with a port that nobody listens at; it stays bound until `held` closes."""
    scheme, host = url.partition("://")[0], host_of(url)
    try:
        probe = held.enter_context(bound_socket(host, port_of(url)))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{name}: cannot listen at {url}: {error}; is another run using it? Port 0 picks a "
            "free one"
        ) from error
    return f"{scheme}://{url_host(host)}:{probe.getsockname()[1]}"
