"""What `streamrl top` shows at one moment, as a record: `--json` prints it.

Invariant: a field that is not known is null or empty, and `unknown` says why. Fields are added, and
none changes its meaning while `schema` is the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from streamrl.cli.display.generators import GeneratorRow, generator_rows
from streamrl.cli.display.numbers import averaged, metric_mean, rate
from streamrl.cli.status import RunStatus, failures_of, headline, waits_for
from streamrl.diagnosis import Finding, diagnose, pending
from streamrl.diagnosis.outcome import outcome, state_of
from streamrl.diagnosis.scaling import ScalingHint
from streamrl.metrics import STALENESS_BUCKETS
from streamrl.types import Books, BufferStats

SCHEMA = 1
_POINTS = 120
_PARTS = ("wait", "plan", "score", "forward", "backward", "update", "snapshot", "save")
_MISMATCH = {
    "eff_sample_size": "mismatch/rollout_is_eff_sample_size",
    "rollout_is_mean": "mismatch/rollout_is_mean",
    "kl": "mismatch/mismatch_kl",
    "veto_fraction": "mismatch/rollout_is_veto_fraction",
    "zero_fraction": "mismatch/rollout_is_applied_zero_fraction",
}
Lines = Sequence[Mapping[str, Any]]


class StepTime(Struct, frozen=True, kw_only=True):
    """Of a step, in seconds; `parts` add up to `step_s`. `wait_due_s` is in the part `wait`."""

    step_s: float
    parts: dict[str, float]
    wait_due_s: float


class Staleness(Struct, frozen=True, kw_only=True):
    """Versions between sampling and training; `num_groups` by bucket: 0, 1, 2, 3_4, 5_8, 9_plus."""

    mean: float | None
    max: float | None
    num_groups: dict[str, int]


class BooksView(Struct, frozen=True, kw_only=True):
    """granted = leased + buffered + taken + trained + acknowledged + dropped, if `balanced`;
    `capacity` is how many may be leased, buffered and taken together."""

    granted: int
    leased: int
    buffered: int
    taken: int
    trained: int
    acknowledged: int
    dropped: dict[str, int]
    balanced: bool
    capacity: int | None


class RunSnapshot(Struct, frozen=True, kw_only=True):
    """One reading of a run. Means are those of the last `num_steps` steps; `rewards` are those of
    all steps, averaged into a few points."""

    schema: int
    run: str
    time_s: float
    state: str
    outcome: str
    headline: str
    findings: tuple[Finding, ...]
    pending: tuple[Finding, ...]
    notes: tuple[str, ...]
    unknown: tuple[str, ...]
    policy_version: int | None
    step: int | None
    max_steps: int | None
    num_steps: int
    steps_per_s: float | None
    eta_s: float | None
    learner: str
    reward: float | None
    rewards: tuple[float, ...]
    step_time: StepTime | None
    books: BooksView | None
    staleness: Staleness | None
    mismatch: dict[str, float]
    generated_tokens_per_s: float | None
    trained_tokens_per_s: float | None
    generators: tuple[GeneratorRow, ...]
    scaling: ScalingHint | None


def make_snapshot(
    status: RunStatus,
    lines: Lines,
    *,
    num_newest: int,
    time_s: float,
    before: BufferStats | None = None,
) -> RunSnapshot:
    """From a status and the lines of `metrics.jsonl` so far, of which `num_newest` at most are
    whole; `before` are stats of an earlier reading."""
    reading, stats = status.reading, status.reading.stats
    newest = lines[-num_newest:]
    step = newest[-1]["step"] if newest else None
    step_s = metric_mean(newest, "learner/step_s")
    left = 0 if step is None or reading.max_steps is None else reading.max_steps - step
    learner = reading.learner
    known = (stats.policy_version if stats else None, learner.policy_version if learner else None)
    return RunSnapshot(
        schema=SCHEMA,
        run=status.name,
        time_s=time_s,
        state=str(state_of(reading)),
        outcome=outcome(reading),
        headline=headline(status),
        findings=diagnose(reading),
        pending=pending(reading),
        notes=tuple(_notes(status)),
        unknown=tuple(_unknown(status, lines)),
        policy_version=max((v for v in known if v is not None), default=None),
        step=step,
        max_steps=reading.max_steps,
        num_steps=len(newest),
        steps_per_s=1 / step_s if step_s else None,
        eta_s=left * step_s if step_s and left > 0 and not reading.is_over else None,
        learner=str(learner.activity) if learner else "",
        reward=metric_mean(newest, "reward/mean"),
        rewards=tuple(averaged([x["reward/mean"] for x in lines if "reward/mean" in x], _POINTS)),
        step_time=_step_time(newest),
        books=_books(stats, status.books),
        staleness=_staleness(newest),
        mismatch={k: v for k, n in _MISMATCH.items() if (v := metric_mean(newest, n)) is not None},
        generated_tokens_per_s=rate(newest, "generator/tokens_per_s"),
        trained_tokens_per_s=metric_mean(newest, "learner/tokens_per_s"),
        generators=tuple(generator_rows(stats, before)) if stats else (),
        scaling=status.scaling,
    )


def _step_time(lines: Lines) -> StepTime | None:
    step_s = metric_mean(lines, "learner/step_s")
    if step_s is None:
        return None
    measured = {part: metric_mean(lines, f"learner/{part}_s") or 0.0 for part in _PARTS}
    rest = max(0.0, step_s - sum(measured.values()))
    parts = {part: seconds for part, seconds in {**measured, "other": rest}.items() if seconds > 0}
    due_s = metric_mean(lines, "learner/wait_due_s") or 0.0
    return StepTime(step_s=step_s, parts=parts, wait_due_s=due_s)


def _staleness(lines: Lines) -> Staleness | None:
    highest = [x["buffer/staleness_max"] for x in lines if "buffer/staleness_max" in x]
    if not highest:
        return None
    counts = {
        bucket: sum(int(line.get(f"buffer/staleness_{bucket}/num_groups", 0)) for line in lines)
        for bucket in STALENESS_BUCKETS
    }
    mean = metric_mean(lines, "buffer/staleness_mean")
    return Staleness(mean=mean, max=max(highest), num_groups=counts)


def _books(stats: BufferStats | None, written: Books | None) -> BooksView | None:
    """Those of the buffer that answers, else those that the last one wrote."""
    books = written if stats is None else stats.books
    if books is None:
        return None
    return BooksView(
        granted=books.granted,
        leased=books.leased,
        buffered=books.buffered,
        taken=books.taken,
        trained=books.trained,
        acknowledged=books.acknowledged,
        dropped={str(reason): count for reason, count in books.dropped.items()},
        balanced=books.balanced,
        capacity=None if stats is None else stats.capacity,
    )


def _notes(status: RunStatus) -> Iterator[str]:
    """What the run waits for, the groups that failed, what is being validated."""
    findings = {finding.sentence for finding in diagnose(status.reading)}
    learner = status.reading.learner
    validating = "" if learner is None else learner.validating
    for sentence in (waits_for(status.reading), failures_of(status.reading), validating):
        if sentence and sentence not in findings:
            yield sentence


def _unknown(status: RunStatus, lines: Lines) -> Iterator[str]:
    if "://" in status.name:
        yield (
            "step times, reward, staleness, mismatch and hints stand in the run's folder, which a "
            "URL does not name"
        )
    elif not lines:
        yield "step times, reward, staleness, mismatch and hints come with the first steps"
    if status.reading.stats is None:
        yield "generators and leases are known to the buffer alone, which does not answer"
