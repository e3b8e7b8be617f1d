"""`streamrl buffer audit`: proves from a run's records that no group was lost or trained twice.

Exit code 1 if anything is not in order. It can run at any time; only after the learner has ended is
the newest checkpoint that of the last step, and known to the buffer.

Each prompt below `next_prompt_index` must be trained (trained.jsonl names the step), open (the
books of the newest checkpoint list it), or dropped for good (the books count it by reason). Steps
after that checkpoint belong to a learner that is running or was killed; none of their prompts may
be in it. If the buffer keeps events, they are compared with all of this. No trained token may be
further from the version of its step than `buffer.max_staleness`, either way: step s trains version
s - 1, and its line of trained.jsonl has the bound that applied to it, since a run may be resumed
with another bound.

Invariant: the events are read before the folder, so every checkpoint that the buffer knows of is
found.
"""

import argparse
import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from buffers.audit import EventAudit, audit_journal, audit_redis, findings
from buffers.journal.sqlite import journal_path
from streamrl.checkpoints.abandoned import read_abandoned
from streamrl.checkpoints.find import Checkpoint, list_checkpoints, newest
from streamrl.checkpoints.history import finished
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, UnreadableCheckpointError
from streamrl.run_folder import (
    BOOKS_FILE,
    LEARNER_FILE,
    config_of,
    find_run,
    is_launched_since,
    read_json,
    read_rows,
)
from streamrl.tracking.jsonl import METRICS_FILE, TRAINED_FILE, read_metrics
from streamrl.types import Books, LearnerActivity, OverduePolicy
from streamrl.types.index_ranges import members

Line: TypeAlias = Mapping[str, Any]


def event_faults(
    events: EventAudit,
    steps: Mapping[int, Sequence[int]],
    checkpoint: Checkpoint | None,
    *,
    has_ended: bool,
) -> Iterator[str]:
    """Faults in the events. `steps` has the prompts that each step of the surviving history
    trained."""
    contained: set[int] = set()
    before: set[int] = set()
    newest = "there is none"
    if checkpoint is not None:
        contained = set(members(finished(checkpoint.books)))
        before = set(members(checkpoint.history.finished_before))
        newest = f"version {checkpoint.policy_version}"
    acknowledged = {i for i, prompt in events.prompts.items() if prompt.is_acknowledged}
    if beyond := sorted(acknowledged - contained):
        yield f"acknowledged beyond the newest checkpoint ({newest}): {beyond}"
    trained = {prompt_index for prompts in steps.values() for prompt_index in prompts}
    by_training = {i for i in acknowledged if not events.prompts[i].by_books}
    if missing := sorted(by_training - trained - before - set(beyond)):
        yield f"acknowledged, and no line of {TRAINED_FILE} has trained them: {missing}"
    waiting = {i for i, prompt in events.prompts.items() if prompt.may_be_trained}
    if has_ended and (again := sorted(contained & waiting)):
        yield f"finished in the newest checkpoint, and the buffer would lend them again: {again}"


def _staleness_faults(lines: Sequence[Line]) -> Iterator[str]:
    """A fault for each step with a token outside the bound."""
    for line in lines:
        version, bound = line["step"] - 1, line["max_staleness"]
        oldest, newest = line["oldest_version"], line["newest_version"]
        of = f"step {line['step']} trained version {version} with tokens of version"
        if version - oldest > bound and line["overdue"] != OverduePolicy.TRAIN:
            yield f"{of} {oldest}, {version - oldest} behind; buffer.max_staleness was {bound}"
        if newest - version > bound:
            yield f"{of} {newest}, {newest - version} ahead; buffer.max_staleness was {bound}"


def _staleness_finding(lines: Sequence[Line]) -> Iterator[str]:
    """One line with the furthest tokens of all steps, either way, and one for each change of the
    bound."""
    if not lines:
        return
    behind = max(line["step"] - 1 - line["oldest_version"] for line in lines)
    ahead = max(line["newest_version"] - line["step"] + 1 for line in lines)
    bounds = ", ".join(str(bound) for bound in sorted({line["max_staleness"] for line in lines}))
    yield (
        f"tokens were at most {max(0, behind)} versions behind the one that trained them and "
        f"{max(0, ahead)} ahead of it, in {len(lines)} steps; buffer.max_staleness {bounds}"
    )
    for line in lines:
        if "steered" in line:
            yield f"step {line['step']} steered the bound {line['steered']}"


@dataclass(frozen=True)
class RunAudit:
    """`findings` are lines with totals; `faults` are contradictions to the promises, none if these
    hold."""

    findings: tuple[str, ...]
    faults: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield all lines, with the verdict last."""
        yield from self.findings
        yield from self.faults
        yield f"{len(self.faults)} faults" if self.faults else "in order"


def check_folder(
    folder: Path,
    events: EventAudit | None,
    last_step: int | None,
    groups_per_step: int | None = None,
) -> RunAudit:
    """Audit a run that has ended with `last_step`, or whose learner may still run (None).

    `groups_per_step` is given if it was the same at all steps.
    """
    checkpoint, faults = _newest(folder)
    trained = read_metrics(folder / TRAINED_FILE)
    metrics = read_metrics(folder / METRICS_FILE, {"buffer/books_balanced"})
    first = 1 if checkpoint is None else checkpoint.history.first_step
    version = 0 if checkpoint is None else checkpoint.policy_version
    for name, lines in ((METRICS_FILE, metrics), (TRAINED_FILE, trained)):
        faults += _step_faults(name, lines, first, version if last_step is None else last_step)
    faults += _balance_faults(metrics, read_json(folder / BOOKS_FILE))
    faults += _batch_faults(trained, groups_per_step)
    # Lines of older releases lack the versions.
    versioned = [line for line in trained if "newest_version" in line]
    faults += _staleness_faults(versioned)
    if last_step is not None and version != last_step:
        of = "none" if checkpoint is None else version
        faults.append(f"the last checkpoint is of version {of}, not of {last_step}")
    steps = {line["step"]: line["prompt_indices"] for line in trained}
    if checkpoint is not None:
        has_rewound = bool(read_abandoned(folder)) or _may_count_twice(checkpoint.books, events)
        faults += _prompt_faults(steps, checkpoint, has_rewound=has_rewound)
    if events is not None:
        faults += event_faults(events, steps, checkpoint, has_ended=last_step is not None)
    sums = [*_finding(steps, checkpoint), *_staleness_finding(versioned), *_other_rows(folder)]
    sums += (
        f"abandoned after step {one.policy_version}: the checkpoints at version "
        f"{', '.join(map(str, one.versions))}, kept in {one.folder} ({one.reason})"
        for one in read_abandoned(folder)
    )
    return RunAudit(tuple(sums), tuple(faults))


def _newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    try:
        found = newest(folder, contents=False)
    except (ConfigError, UnreadableCheckpointError) as error:
        return None, [str(error)]
    return found, [damage.sentence for damage in found.damaged] if found else []


def _step_faults(name: str, lines: Sequence[Line], first: int, last: int) -> Iterator[str]:
    counts = Counter(line["step"] for line in lines)
    if missing := sorted(set(range(first, last + 1)) - counts.keys()):
        yield f"{name} lacks the steps {missing}"
    if repeated := sorted(step for step, count in counts.items() if count > 1):
        yield f"{name} has more than one line of the steps {repeated}"


def _balance_faults(metrics: Sequence[Line], final: Line) -> Iterator[str]:
    if unbalanced := [line["step"] for line in metrics if line.get("buffer/books_balanced") != 1]:
        yield f"the books do not close at the steps {unbalanced}"
    if final and not final["balanced"]:
        yield f"the buffer's last books ({BOOKS_FILE}) do not close"


def _batch_faults(trained: Sequence[Line], groups_per_step: int | None) -> Iterator[str]:
    at: dict[int, list[int]] = {}
    for line in trained:
        prompt_indices = line["prompt_indices"]
        if groups_per_step is not None and len(prompt_indices) != groups_per_step:
            yield f"step {line['step']} trained {len(prompt_indices)} groups, not {groups_per_step}"
        for prompt_index in prompt_indices:
            at.setdefault(prompt_index, []).append(line["step"])
    for prompt_index, steps in at.items():
        if len(steps) > 1:
            yield f"prompt {prompt_index} was trained by the steps {steps}"


def _prompt_faults(
    steps: Mapping[int, Sequence[int]], checkpoint: Checkpoint, *, has_rewound: bool
) -> Iterator[str]:
    """Contradictions between the trained prompts and the books of the newest checkpoint."""
    books, version = checkpoint.books, checkpoint.policy_version
    inside = {p for step, prompts in steps.items() if step <= version for p in prompts}
    beyond = {p for step, prompts in steps.items() if step > version for p in prompts}
    if not books.balanced:
        yield "the books of the last checkpoint do not close"
    still_open = set(books.open_prompt_indices)
    if again := sorted(inside & still_open):
        yield f"trained, yet still to be trained by the last checkpoint's books: {again}"
    if unknown := sorted(index for index in inside if index >= books.next_prompt_index):
        yield f"trained, yet never granted by the last checkpoint's books: {unknown}"
    if again := sorted(beyond & set(members(finished(books)))):
        yield f"trained after version {version}, yet finished in its checkpoint: {again}"
    ended = _ended_untrained(steps, checkpoint)
    # This also counts prompts that an abandoned history dropped and that were granted again since.
    dropped = sum(count for reason, count in books.dropped.items() if not reason.returns_prompt)
    if len(ended) > dropped:
        yield (
            f"prompts are lost: neither trained nor open: {sorted(ended)}; the books count "
            f"{dropped} dropped for good"
        )
    # The books also count groups that an abandoned history trained.
    is_exact = not (checkpoint.history.finished_before or has_rewound)
    counted = books.acknowledged + books.trained
    if counted < len(inside) or (is_exact and counted > len(inside)):
        yield f"the books count {counted} trained groups; {TRAINED_FILE} names {len(inside)}"


def _may_count_twice(books: Books, events: EventAudit | None) -> bool:
    """Whether the books may count groups twice: the buffer has freed groups of a checkpoint that is
    gone without a record in abandoned.

    The events of a buffer that was lost and restored from books do not say what was before.
    """
    if events is None or events.contained or any(p.by_books for p in events.prompts.values()):
        return books.learner_term > 1
    return bool(events.num_reopened)


def _ended_untrained(steps: Mapping[int, Sequence[int]], checkpoint: Checkpoint) -> set[int]:
    """Prompts that are neither open in the checkpoint nor trained by the steps up to it."""
    books, version = checkpoint.books, checkpoint.policy_version
    trained = {p for step, prompts in steps.items() if step <= version for p in prompts}
    ended = trained.union(books.open_prompt_indices, members(checkpoint.history.finished_before))
    return set(range(books.next_prompt_index)) - ended


def _finding(steps: Mapping[int, Sequence[int]], checkpoint: Checkpoint | None) -> Iterator[str]:
    trained = f"{len(steps)} steps trained {sum(map(len, steps.values()))} prompts"
    if checkpoint is None:
        yield f"{trained}; there is no checkpoint"
        return
    books, version = checkpoint.books, checkpoint.policy_version
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(books.dropped.items()))
    num_open, num_dropped = len(books.open_prompt_indices), len(_ended_untrained(steps, checkpoint))
    yield (
        f"{trained}; of {books.next_prompt_index} granted {num_open} are open and {num_dropped} "
        f"dropped for good, by the checkpoint of version {version} ({books.granted} leases; "
        f"dropped: {reasons or 'none'})"
    )


def _other_rows(folder: Path) -> Iterator[str]:
    for before, after in pairwise(read_rows(folder)):
        then, now = (
            " and ".join(f"{of.num_rows} rows of {of.path}" for of in rows.sources)
            for rows in (before, after)
        )
        yield (
            f"the data changed before prompt {after.first_prompt_index} (data.changed: allow): "
            f"{then} until there, then an epoch of {now} began"
        )


def audit_run(folder: Path, complete: RunConfig | None = None) -> RunAudit:
    """Audit a run. `complete` is the configuration of a run that was never resumed and must be
    complete; None for a run that may still be running, or was resumed with other settings.

    Raises:
        ConfigError: this is no run folder, or it has nothing to audit.
    """
    events = _audit_events(folder)
    last_step = _last_step(folder) if complete is None else complete.run.max_steps
    if events is None and last_step is None and not list_checkpoints(folder):
        raise ConfigError(
            f"{folder} has no journal (buffer.journal), and its learner has saved no checkpoint: "
            "there is nothing to audit yet"
        )
    sums = ("no events are kept (buffer.journal)",) if events is None else tuple(findings(events))
    faults = () if events is None else events.faults
    groups_per_step = None if complete is None else complete.learner.groups_per_step
    check = check_folder(folder, events, last_step, groups_per_step)
    return RunAudit((*sums, *check.findings), (*faults, *check.faults))


def _audit_events(folder: Path) -> EventAudit | None:
    """Audit the events of the journal, or of the server with the run's state; None if no events are
    kept."""
    if journal_path(folder).exists():
        return audit_journal(journal_path(folder))
    config = config_of(folder)
    if config.buffer.binds_url:
        return None
    return asyncio.run(audit_redis(config.buffer.secret_url, config.run.name))


def _last_step(folder: Path) -> int | None:
    """The step with which the learner ended. None while it runs, after a crash, before the first
    step, and if another launch has begun since (its learner may have been killed before it
    reported)."""
    status = read_json(folder / LEARNER_FILE)
    is_relaunched = is_launched_since(folder, status.get("time_s", math.inf))
    has_ended = status.get("activity") == LearnerActivity.ENDED and not is_relaunched
    return status["policy_version"] or None if has_ended else None


def main(arguments: argparse.Namespace) -> int:
    target = arguments.folder
    # A folder is audited as it stands, since a journal alone says enough.
    folder = Path(target) if Path(target).is_dir() else find_run(target).run.path
    audit = audit_run(folder)
    print("\n".join(audit.lines()))
    return 1 if audit.faults else 0
