"""Prints numbers of a run's metrics and books, and the summary of a run."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from streamrl.checkpoints.find import newest
from streamrl.config import RunConfig
from streamrl.diagnosis.scaling import scaling_hint
from streamrl.errors import StreamRLError
from streamrl.run_folder import (
    PAGE_FILE,
    ended_launch,
    read_books,
    read_evaluation,
    read_launch,
    read_learner,
    read_restarts,
)
from streamrl.samples.record import printable
from streamrl.tracking.jsonl import best_of, read_metrics, read_validations
from streamrl.types import Books

RECENT = 20
"""The number of steps over which displays take means, except for the training reward."""
_LARGEST = 1e100
_PROMPTS = ("num_prompts", "num_failed", "num_too_long")
_REWARD_STEPS = 10
_BARS = " ▁▂▃▄▅▆▇█"

Lines = Sequence[Mapping[str, Any]]


def numbers_of(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """A line of metrics without values that are no reasonable numbers, as a damaged file may
    contain."""
    return {k: v for k, v in line.items() if isinstance(v, int | float) and abs(v) < _LARGEST}


def metric_mean(lines: Lines, name: str) -> float | None:
    """Return the mean of a metric over the lines that have it; None if there are none."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def rate(lines: Lines, name: str) -> float | None:
    """A metric per second over the total time of the lines that have it; None without any.

    A mean of rates would count a short step as much as a long one.
    """
    measured = [line for line in lines if line.get(name) is not None]
    seconds = steps_s(measured)
    amounts = (line[name] * (line.get("learner/step_s") or 0.0) for line in measured)
    return sum(amounts) / seconds if seconds > 0 else None


def steps_s(lines: Lines) -> float:
    """The total time of the steps, from the learner's attach to the last step, without the time
    between a learner's end and its resumption."""
    return sum(line.get("learner/step_s") or 0.0 for line in lines)


def training_reward(lines: Lines) -> float | None:
    """The training reward that every display shows: the mean of the last 10 steps, or of a third of
    a short run, so that first and last steps do not overlap. `lines` are those steps, or more. None
    without a reward."""
    return metric_mean(lines[-_num_reward_steps(lines) :], "reward/mean")


def reward_text(lines: Lines) -> str:
    """Such as: training reward 0.176 (mean of the last 10 steps); "" without a reward."""
    value, steps = training_reward(lines), mean_of_last(_num_reward_steps(lines))
    return "" if value is None else f"training reward {value:.3f} ({steps})"


def mean_of_last(num_steps: int) -> str:
    """Describe a mean of so many steps.

    >>> mean_of_last(20), mean_of_last(1)
    ('mean of the last 20 steps', 'last step')
    """
    return f"mean of the last {num_steps} steps" if num_steps > 1 else "last step"


def reward_change(lines: Lines) -> str:
    """The training reward of the first and the last steps, such as: 0.254 -> 0.176 (mean of the
    first 2 and the last 2 steps); "" without a reward. `lines` are all lines of the run."""
    num_last = _num_reward_steps(lines)
    num_first = min(5, num_last)
    first, last = metric_mean(lines[:num_first], "reward/mean"), training_reward(lines)
    if first is None or last is None:
        return ""
    steps = f"mean of the first {num_first} and the last {num_last} steps"
    steps = steps if num_last > 1 else "the first and the last step"
    return f"{first:.3f} -> {last:.3f} ({steps if len(lines) > 1 else '1 step'})"


def _num_reward_steps(lines: Lines) -> int:
    return min(_REWARD_STEPS, max(1, lines[-1]["step"] // 3)) if lines else 1


def remaining(lines: Lines, max_steps: int, checkpoint_every: int) -> Mapping[str, float]:
    """Estimated seconds until the next checkpoint and the last step, from the time of recent steps;
    {} if unknown."""
    step_s = metric_mean(lines[-RECENT:], "learner/step_s")
    if step_s is None or (step := lines[-1]["step"]) >= max_steps:
        return {}
    due = min(max_steps, (step // checkpoint_every + 1) * checkpoint_every)
    return {f"checkpoint {due}": (due - step) * step_s, "end": (max_steps - step) * step_s}


def remaining_texts(seconds: Mapping[str, float]) -> Iterator[str]:
    """Yield texts such as: checkpoint 400 in 0:12; ETA 1:30."""
    for name, left_s in seconds.items():
        yield f"ETA {duration(left_s)}" if name == "end" else f"{name} in {duration(left_s)}"


def wait_shares(lines: Lines) -> str:
    """Shares of the step time: `learner/wait_s` and, if there was any, `learner/wait_due_s`.

    Such as: waits 45 %, due groups 34 %. The second may overlap with the training of a part.
    """
    step_s = max(metric_mean(lines, "learner/step_s") or 1.0, 1e-9)
    percent = 100 * (metric_mean(lines, "learner/wait_s") or 0.0) / step_s
    percent_due = 100 * (metric_mean(lines, "learner/wait_due_s") or 0.0) / step_s
    due = f", due groups {percent_due:.0f} %" if percent_due >= 0.5 else ""
    return f"waits {percent:.0f} %{due}"


def duration(seconds: float) -> str:
    """Return a time such as 4.2 s, 1:05 or 2:00:30.

    >>> duration(4.24), duration(65), duration(7230)
    ('4.2 s', '1:05', '2:00:30')
    """
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short(value: float) -> str:
    """A number with three digits, or with all digits before the point if there are more.

    >>> short(0.08581), short(2134.5)
    ('0.0858', '2,134')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values as at most `width` bars, each the mean of several values. The scale goes from 0,
    or the smallest bar below 0, to the largest."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [fmean(values[i : i + size]) for i in range(0, len(values), size)]
    lowest = min(0.0, *means)
    height = max(max(means) - lowest, 1e-9)
    return "".join(_BARS[round((m - lowest) / height * (len(_BARS) - 1))] for m in means)


def books_rows(books: Books) -> list[tuple[str, str]]:
    """Return name and value of two lines: the books' equation, and whether it holds."""
    columns = ("leased", "buffered", "taken", "trained", "acknowledged")
    counts = ((name, getattr(books, name)) for name in columns)
    parts = " + ".join(f"{count} {name}" for name, count in counts if count)
    reasons = ", ".join(f"{reason} {count}" for reason, count in books.dropped.items())
    total = sum(books.dropped.values())
    dropped = f" + {total} dropped ({reasons})" if total else ""
    return [("groups", f"{books.granted} leased = {parts}{dropped}"), ("", balance(books))]


def balance(books: Books) -> str:
    return "the books close" if books.balanced else "THE BOOKS DO NOT CLOSE"


_MEANS = {
    "staleness, mean": "buffer/staleness_mean",
    "ESS, mean": "mismatch/rollout_is_eff_sample_size",
    "learner wait per step, mean, s": "learner/wait_s",
    "trained tokens/s of computing time": "learner/tokens_per_s",
}
SUMMARY_METRICS = frozenset(
    {
        *_MEANS.values(),
        *("reward/mean", "buffer/staleness_max", "learner/step_s", "generator/tokens_per_s"),
    }
)
"""The metrics that the summary reads from every line; from the last one it reads more."""


def summary(config: RunConfig, *, but: str | None = None) -> Table:
    """The table that a launch prints at its end, and `streamrl report` at any time; without the row
    named `but`."""
    folder = config.run.path
    lines = read_metrics(folder / "metrics.jsonl", SUMMARY_METRICS)
    table = Table(title=Text(f"{config.run.name}: summary"), show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    # A failure may quote what the policy wrote.
    for name, value in summary_rows(config, lines):
        if name != but:
            table.add_row(Text(printable(name)), Text(printable(value)))
    table.add_row("run folder", Text(str(folder)))
    if (folder / PAGE_FILE).exists():
        table.add_row("report", Text(str(folder / PAGE_FILE)))
    return table


def summary_rows(config: RunConfig, lines: Lines) -> list[tuple[str, str]]:
    """Return name and value of each row; what was not measured is left out."""
    folder = config.run.path
    failure = read_launch(folder).failure
    failed = [("launch failed", failure)] if failure else []
    if not lines:
        return [("steps", "0"), *failed, *restart_rows(folder)]
    rows = [("steps", str(lines[-1]["step"])), *failed]
    if change := reward_change(lines):
        rows.append(("training reward", change))
    rows += held_out_rows(config)
    for label, name in _MEANS.items():
        if (value := metric_mean(lines, name)) is not None:
            rows.append((label, short(value)))
    if (generated := rate(lines, "generator/tokens_per_s")) is not None:
        rows.append(("generated tokens/s", short(generated)))
    staleness = [line["buffer/staleness_max"] for line in lines if "buffer/staleness_max" in line]
    if staleness:
        rows.append(("staleness, largest", f"{max(staleness)}"))
    rows += _length_rows(lines[-1])
    if books := read_books(folder):
        rows += books_rows(books)
    learner = read_learner(folder)
    if learner is not None and learner.failures:
        rows.append(("failures", learner.failures))
    if ended_launch(folder) is not None:
        rows += unsaved_rows(folder, lines[-1]["step"])
    rows += [("learning", sign) for sign in learner.signs] if learner is not None else []
    rows += restart_rows(folder)
    if (hint := scaling_hint(lines[-1])) is not None:
        rows.append(("scaling", hint.sentence))
    return [*rows, ("time of the steps", duration(steps_s(lines)))]


def unsaved_rows(folder: Path, step: int) -> list[tuple[str, str]]:
    """For a run that has ended at this step: the steps that are in no checkpoint."""
    try:
        checkpoint = newest(folder, contents=False)
    except StreamRLError:
        # Resuming the run reports what is wrong with the checkpoint.
        return []
    saved = 0 if checkpoint is None else checkpoint.policy_version
    if saved >= step:
        return []
    steps = f"steps {saved + 1} to {step} are" if step > saved + 1 else f"step {step} is"
    whence = f"from step {saved}" if saved else "from the start"
    return [("unsaved", f"{steps} in no checkpoint; --resume goes on {whence}")]


def held_out_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Rows with the validations of the run and, unless it comes from the validator, the evaluation
    of its final checkpoint."""
    validated, evaluation = validation_text(config), read_evaluation(config.run.path)
    rows = [("held-out reward", validated)] if validated else []
    is_among = validated and evaluation.get("by") == "validator"
    if (evaluated := _evaluation_text(evaluation)) and not is_among:
        rows.append((f"held-out reward{', evaluated' if validated else ''}", evaluated))
    return rows


def held_out_curve(config: RunConfig) -> dict[int, float]:
    """The value of `validation.metric` for each validated version, oldest first."""
    metric = config.validation.watched_metric
    validated = read_validations(config.run.path)
    return {version: m[metric] for version, m in validated.items() if m.get(metric) is not None}


def validation_text(config: RunConfig) -> str:
    """Such as: 0.250 -> 0.344 (greedy, 256 prompts; versions 0 and 40), best 0.375 of version 30;
    "" before the first validation. A metric other than the mean reward is preceded by its name."""
    settings = config.validation
    metric, validated = settings.watched_metric, read_validations(config.run.path)
    known = held_out_curve(config)
    best = best_of(validated, metric, settings.best_is)
    if best is None:
        return ""
    first, last = min(known), max(known)
    name = metric.removeprefix("validation/")
    name = "" if name.startswith("mean@") else f"{name} "
    is_greedy = settings.num_samples == 1 and settings.temperature == 0
    how = "greedy" if is_greedy else f"{settings.num_samples} samples"
    how += f", {_scored({n: validated[last].get(f'validation/{n}', 0) for n in _PROMPTS})}"
    if first == last:
        return f"{name}{known[first]:.3f} ({how}; version {first})"
    versions = f"{how}; versions {first} and {last}"
    text = f"{name}{known[first]:.3f} -> {known[last]:.3f} ({versions})"
    if best.value == known[last]:
        return text
    return f"{text}, best {best.value:.3f} of version {best.policy_version}"


def _evaluation_text(evaluation: Mapping[str, Any]) -> str:
    """Such as: 0.336 (greedy, 256 prompts, 2 failed; version 40); "" before an evaluation. A model
    that is no checkpoint is named."""
    score = evaluation.get("greedy_reward_mean")
    model = str(evaluation.get("model", ""))
    version = Path(model).name.removeprefix("step-")
    of = f"; version {int(version)}" if version.isdecimal() else f"; {model}" if model else ""
    return "" if score is None else f"{score:.3f} (greedy, {_scored(evaluation)}{of})"


def _scored(counts: Mapping[str, Any]) -> str:
    """Return a text such as: 256 prompts, 2 failed."""
    number, *left_out = (int(counts.get(name) or 0) for name in _PROMPTS)
    reasons = zip(left_out, ("failed", "too long"), strict=True)
    return ", ".join([f"{number} prompts", *(f"{n} {why}" for n, why in reasons if n)])


def restart_rows(folder: Path) -> list[tuple[str, str]]:
    """Return rows such as: restarts of learner, 3: was killed by SIGKILL (2 times); ValueError:
    oops."""
    rows = []
    for role, sentences in sorted(read_restarts(folder).items()):
        counts = Counter(sentences).items()
        reasons = (f"{reason} ({n} times)" if n > 1 else reason for reason, n in counts)
        rows.append((f"restarts of {role}", f"{len(sentences)}: {'; '.join(reasons)}"))
    return rows


def _length_rows(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The response lengths of the last window of steps, if responses were counted."""
    names = ("sampled_length_mean", "trained_length_mean", "dropped_tokens_frac")
    sampled, trained, dropped = (last.get(f"fairness/{name}") for name in names)
    # A learner that has just resumed has seen no sampled responses.
    if not sampled or trained is None or dropped is None:
        return []
    lost = f", {100 * dropped:.1f} % of tokens dropped" if dropped else ""
    return [("response length, last steps", f"{sampled:.3g} sampled, {trained:.3g} trained{lost}")]
