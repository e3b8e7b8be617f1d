"""The audit of a run: its buffer's events and its folder, in sentences.

`streamrl buffer audit` and `streamrl chaos` print it, at any time of a run. Only after its learner
has ended is its newest checkpoint that of its last step, and has the buffer heard of it.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from buffers.audit import EventAudit, audit_journal, audit_redis, findings
from buffers.journal.journal import journal_path
from streamrl.checkpoints.find import list_checkpoints
from streamrl.cli.verification.run_folder import check_folder
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.run_folder import LEARNER_FILE, config_of, read_json
from streamrl.types import LearnerActivity


@dataclass(frozen=True)
class RunAudit:
    """`findings` are sums, in lines; `faults` contradict the promises, none if they hold."""

    findings: tuple[str, ...]
    faults: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Everything, with the verdict last."""
        yield from self.findings
        yield from self.faults
        yield f"{len(self.faults)} faults" if self.faults else "in order"


def audit_run(folder: Path, complete: RunConfig | None = None) -> RunAudit:
    """`complete` is the configuration of a run that was never resumed and must be complete; None
    for a run that may still run, or may have been resumed with other settings.

    Raises:
        ConfigError: this is no run folder, or it holds nothing to audit.
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
    """Of the journal, or of the server that holds the run's state; None if no events are kept."""
    if journal_path(folder).exists():
        return audit_journal(journal_path(folder))
    config = config_of(folder)
    if config.buffer.has_daemon:
        return None
    return asyncio.run(audit_redis(config.buffer.secret_url, config.run.name))


def _last_step(folder: Path) -> int | None:
    """With which the learner has ended; None while it runs, after a crash, and before a step."""
    status = read_json(folder / LEARNER_FILE)
    has_ended = status.get("activity") == LearnerActivity.ENDED
    return status["policy_version"] or None if has_ended else None
