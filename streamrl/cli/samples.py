"""`streamrl samples`: a pager for what a run has trained on, or what validations have sampled.

Samples come newest first and can be filtered; with all validations, the versions of a prompt stand
side by side. `--json` prints JSON Lines. On the terminal, the model's texts are shown without
control characters, and without the markup of the chat template unless `--markup` is given.
"""

import argparse
import heapq
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby, islice
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from streamrl.errors import ConfigError
from streamrl.run_folder import find_run
from streamrl.samples.files import (
    newest_first,
    read_samples,
    side_by_side,
    validation_file,
    validation_files,
)
from streamrl.samples.record import POLICY, Sample, cut, printable

_ANSWER, _SIDE_BY_SIDE = 60, 400
"""The most characters shown of an answer, and of a text beside others."""


def rendered(sample: Sample, longest: int | None = None, *, markup: bool = False) -> Panel:
    """A panel with a sample's verdict, facts, prompt and messages, with the chat template's tokens
    if `markup`; texts longer than `longest` are cut."""
    sample = sample if markup else sample.without_markup()
    title = Text(f"step {sample.step}, prompt {sample.prompt_index}, reward {sample.reward:.4g}")
    parts = [
        Text(", ".join(verdict(sample)), style="bold"),
        Text(", ".join(facts(sample)), style="italic"),
        Text(_shown(sample.prompt, longest), style="dim"),
    ]
    for message in sample.messages:
        style = "" if message.role == POLICY else "cyan"
        parts.append(Text(_shown(message.content, longest), style=style))
    return Panel(Group(*filter(None, parts)), title=title, title_align="left")


def _side_by_side(samples: Sequence[Sample], *, markup: bool) -> Iterator[Panel]:
    """Yield a panel for each prompt, with each version's response, oldest first."""
    shown = (sample if markup else sample.without_markup() for sample in samples)
    for index, of_prompt in groupby(shown, key=lambda sample: sample.prompt_index):
        table = Table("version", "reward", "response", "", box=None, pad_edge=False)
        for sample in of_prompt:
            response = Text(_shown(sample.response, _SIDE_BY_SIDE))
            said = Text("\n".join(readings(sample)))
            table.add_row(f"{sample.step}", f"{sample.reward:.4g}", response, said)
        prompt = Text(_shown(sample.prompt, _SIDE_BY_SIDE), style="dim")
        title = Text(", ".join((f"prompt {index}", *expectation(sample))))
        yield Panel(Group(prompt, table), title=title, title_align="left")


def verdict(sample: Sample) -> Iterator[str]:
    """The expected answer, the extracted one, and each of several rewards."""
    yield from expectation(sample)
    yield from readings(sample)


def expectation(sample: Sample) -> Iterator[str]:
    if sample.answer:
        yield f"expected {_shown(sample.answer, _ANSWER)}"


def readings(sample: Sample) -> Iterator[str]:
    """The answer extracted from the response, if a reward looks for one, and each of several
    rewards."""
    if sample.extracted is not None:
        yield f"extracted {_shown(sample.extracted or 'nothing', _ANSWER)}"
    if len(sample.rewards) > 1:
        for name, value in sample.rewards.items():
            yield f"{printable(name)} {value:.4g}"


def facts(sample: Sample) -> Iterator[str]:
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


def _shown(text: str, longest: int | None) -> str:
    """A text without control characters; only its first and last part if it is too long."""
    return printable(text if longest is None else cut(text, longest))


def main(arguments: argparse.Namespace) -> int:
    run = find_run(arguments.folder).run.path
    if arguments.validation == "all":
        if arguments.best or arguments.worst:
            order = "best" if arguments.best else "worst"
            raise ConfigError(f"--{order}: has no effect on --validation all")
        _validations(run)
        samples = list(matching(side_by_side(run, num_prompts=arguments.limit), arguments))
    else:
        given = arguments.validation
        found = newest_first(run) if given is None else _validated(run, given)
        samples = chosen(found, arguments)
    if arguments.json:
        for sample in samples:
            print(json.dumps(msgspec.to_builtins(sample)))
        return 0
    console, markup = Console(highlight=False), arguments.markup
    if arguments.validation == "all":
        panels = _side_by_side(samples, markup=markup)
    else:
        panels = (rendered(sample, markup=markup) for sample in samples)
    plural = "" if len(samples) == 1 else "s"
    with console.pager(styles=True) if sys.stdout.isatty() else nullcontext():
        for panel in panels:
            console.print(panel)
        console.print(f"{len(samples)} sample{plural}" if samples else f"{run} has no such samples")
    return 0


def _validated(run: Path, given: str) -> Sequence[Sample]:
    """The samples of the given validation, or of the newest."""
    files = _validations(run)
    if given == "newest":
        path = files[-1]
    elif given.isascii() and given.isdigit():
        path = validation_file(run, int(given))
    else:
        raise ConfigError(f"--validation: was {given!r}; it must be a version, such as 20, or all")
    if path not in files:
        versions = ", ".join(str(int(file.stem)) for file in files)
        raise ConfigError(
            f"--validation: there are no responses of version {given}, but of {versions}"
        )
    return list(read_samples(path))


def _validations(run: Path) -> Sequence[Path]:
    if files := validation_files(run):
        return files
    raise ConfigError(
        f"--validation: {run} has no responses of a validation; validation.every says when there "
        "are validations"
    )


def chosen(samples: Iterable[Sample], wanted: argparse.Namespace) -> list[Sample]:
    """At most `limit` of the samples that match (`samples` come newest first); no more are kept in
    memory."""
    found = matching(samples, wanted)
    if wanted.best:
        return heapq.nlargest(wanted.limit, found, key=lambda sample: sample.reward)
    if wanted.worst:
        return heapq.nsmallest(wanted.limit, found, key=lambda sample: sample.reward)
    return list(islice(found, wanted.limit))


def matching(samples: Iterable[Sample], wanted: argparse.Namespace) -> Iterator[Sample]:
    """Yield the samples that match all filters; ranges include both ends."""
    first, last = _steps(wanted.step)
    try:
        pattern = None if wanted.grep is None else re.compile(wanted.grep)
    except re.error as error:
        raise ConfigError(f"--grep: {wanted.grep!r} is no regular expression: {error}") from error
    for s in samples:
        texts = (s.prompt, *(message.content for message in s.messages))
        conditions = (
            first is None or s.step >= first,
            last is None or s.step <= last,
            wanted.min_reward is None or s.reward >= wanted.min_reward,
            wanted.max_reward is None or s.reward <= wanted.max_reward,
            wanted.environment in (None, s.environment),
            wanted.data_source in (None, s.data_source),
            pattern is None or any(map(pattern.search, texts)),
        )
        if all(conditions):
            yield s


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
    if last and int(last) < int(first):
        raise ConfigError(f"--step: was {given!r}; the last step must not be below the first")
    return int(first), (int(last) if last else None) if is_range else int(first)
