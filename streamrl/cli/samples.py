"""`streamrl samples`: a pager of what a run has trained on, or of what a validation has sampled.

Newest first, through filters. JSON Lines where `--json` asks for them. What the model wrote reaches
the terminal without its control characters.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from streamrl.errors import ConfigError
from streamrl.run_folder import find_run
from streamrl.samples.files import (
    Order,
    SampleFilter,
    newest_first,
    read_samples,
    validation_file,
    validation_files,
)
from streamrl.samples.record import POLICY, Sample, as_json, printable


def rendered(sample: Sample, longest: int | None = None) -> Panel:
    """Its facts, its prompt and its messages; texts longer than `longest` are cut."""
    title = Text(f"step {sample.step}, prompt {sample.prompt_index}, reward {sample.reward:.4g}")
    parts = [
        Text(", ".join(facts(sample)), style="italic"),
        Text(_shown(sample.prompt, longest), style="dim"),
    ]
    for message in sample.messages:
        style = "" if message.role == POLICY else "cyan"
        parts.append(Text(_shown(message.content, longest), style=style))
    return Panel(Group(*parts), title=title, title_align="left")


def facts(sample: Sample) -> Iterator[str]:
    """What is known of it, a few words each."""
    versions = {sample.version, sample.newest_version}
    yield f"version {'-'.join(map(str, sorted(versions)))}"
    if sample.staleness is not None:
        yield f"staleness {sample.staleness}"
    if (weights := sample.importance_weights) is not None:
        yield f"importance weight {weights.mean:.3g} ({weights.min:.3g} to {weights.max:.3g})"
    yield f"{sample.num_response_tokens} tokens, {sample.finish_reason}"
    yield printable(sample.environment)
    if sample.data_source:
        yield printable(sample.data_source)
    if sample.answer:
        yield f"answer {_shown(sample.answer, 60)}"


def _shown(text: str, longest: int | None) -> str:
    """Without control characters; the first and the last part of one that is too long."""
    if longest is not None and len(text) > longest:
        half = longest // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return printable(text)


def main(arguments: argparse.Namespace) -> int:
    """
    Raises:
        ConfigError: a filter is malformed, or there is no such validation.
    """
    run = find_run(arguments.folder).run.path
    samples = _filter(arguments).of(_all(run, arguments.validation))
    if arguments.json:
        for sample in samples:
            print(json.dumps(as_json(sample)))
        return 0
    console = Console(highlight=False)
    with console.pager(styles=True) if sys.stdout.isatty() else nullcontext():
        for sample in samples:
            console.print(rendered(sample))
        console.print(_count(samples, run))
    return 0


def _all(run: Path, validation: str | None) -> Iterator[Sample]:
    if validation is None:
        return newest_first(run)
    return iter(_validated(run, validation))


def _validated(run: Path, given: str) -> Sequence[Sample]:
    """Of the version that is given, or of the newest."""
    files = validation_files(run)
    if not files:
        raise ConfigError(f"--validation: {run} has no responses of a validation")
    path = files[-1] if given == "newest" else validation_file(run, _version(given))
    if path not in files:
        versions = ", ".join(str(int(file.stem)) for file in files)
        raise ConfigError(
            f"--validation: there are no responses of version {given}, but of {versions}"
        )
    return list(read_samples(path))


def _version(given: str) -> int:
    if not (given.isascii() and given.isdigit()):
        raise ConfigError(f"--validation: was {given!r}; it must be a version, such as 20")
    return int(given)


def _filter(arguments: argparse.Namespace) -> SampleFilter:
    first, last = _steps(arguments.step)
    return SampleFilter(
        first_step=first,
        last_step=last,
        min_reward=arguments.min_reward,
        max_reward=arguments.max_reward,
        environment=arguments.environment,
        data_source=arguments.data_source,
        pattern=_pattern(arguments.grep),
        order=_order(arguments),
        limit=arguments.limit,
    )


def _order(arguments: argparse.Namespace) -> Order:
    if arguments.best:
        return "best"
    return "worst" if arguments.worst else "newest"


def _steps(given: str | None) -> tuple[int | None, int | None]:
    """
    >>> _steps("7"), _steps("10-20"), _steps("10-")
    ((7, 7), (10, 20), (10, None))
    """
    if given is None:
        return None, None
    found = re.fullmatch(r"(\d+)(-(\d*))?", given, re.ASCII)
    if found is None:
        raise ConfigError(f"--step: was {given!r}; it must be a step or a range, such as 10-20")
    first, is_range, last = found.groups()
    return int(first), (int(last) if last else None) if is_range else int(first)


def _pattern(given: str | None) -> "re.Pattern[str] | None":
    if given is None:
        return None
    try:
        return re.compile(given)
    except re.error as error:
        raise ConfigError(f"--grep: {given!r} is no regular expression: {error}") from error


def _count(samples: Sequence[Sample], run: Path) -> str:
    return f"{len(samples)} samples" if samples else f"{run} has no such samples"
