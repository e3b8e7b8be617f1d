"""The summary of a run: a table made from the files of its folder."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from streamrl.cli.display.numbers import (
    books_rows,
    duration,
    metric_mean,
    rate,
    reward_change,
    short,
    steps_s,
)
from streamrl.config import RunConfig
from streamrl.diagnosis.scaling import scaling_hint
from streamrl.run_folder import (
    PAGE_FILE,
    read_books,
    read_json,
    read_launch,
    read_learner,
    read_restarts,
)
from streamrl.samples.record import printable
from streamrl.tracking.jsonl import best_of, read_metrics, read_validations

SUMMARY_METRICS = frozenset(
    {
        "reward/mean",
        "buffer/staleness_mean",
        "buffer/staleness_max",
        "mismatch/rollout_is_eff_sample_size",
        "learner/wait_s",
        "learner/step_s",
        "learner/tokens_per_s",
        "generator/tokens_per_s",
    }
)
"""What the summary reads of every line; of the last one it reads more."""


def summary(config: RunConfig) -> Table:
    """The table at the end of a run, and of `streamrl report` at any time."""
    folder = config.run.path
    lines = read_metrics(folder / "metrics.jsonl", SUMMARY_METRICS)
    table = Table(title=Text(f"{config.run.name}: summary"), show_header=False)
    # A failure may quote what the policy wrote.
    for name, value in summary_rows(lines, folder, validation_text(config)):
        table.add_row(Text(printable(name)), Text(printable(value)))
    table.add_row("run folder", Text(str(folder)))
    if (folder / PAGE_FILE).exists():
        table.add_row("report", Text(str(folder / PAGE_FILE)))
    return table


def summary_rows(
    lines: Sequence[Mapping[str, Any]], folder: Path, validated: str = ""
) -> list[tuple[str, str]]:
    """Name and value of each row; those that were not measured are left out."""
    failure = read_launch(folder).failure
    failed = [("launch failed", failure)] if failure else []
    if not lines:
        return [("steps", "0"), *failed, *restart_rows(folder)]
    rows = [("steps", str(lines[-1]["step"])), *failed]
    if change := reward_change(lines):
        rows.append(("training reward", change))
    rows += held_out_rows(folder, validated)
    for label, name in (
        ("staleness, mean", "buffer/staleness_mean"),
        ("ESS, mean", "mismatch/rollout_is_eff_sample_size"),
        ("learner wait per step, mean, s", "learner/wait_s"),
        ("trained tokens/s of computing time", "learner/tokens_per_s"),
    ):
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
    rows += [("learning", sign) for sign in learner.signs] if learner is not None else []
    rows += restart_rows(folder)
    if (hint := scaling_hint(lines[-1])) is not None:
        rows.append(("scaling", hint.sentence))
    return [*rows, ("time of the steps", duration(steps_s(lines)))]


def held_out_rows(folder: Path, validated: str) -> list[tuple[str, str]]:
    """The validations of the run and, where it is not the last of these, the evaluation of its
    final checkpoint; the name and what it is."""
    rows = [("held-out reward", validated)] if validated else []
    is_among = bool(validated) and read_json(folder / "evaluation.json").get("by") == "validator"
    if (evaluated := held_out_reward(folder)) and not is_among:
        rows.append((f"held-out reward{', evaluated' if validated else ''}", evaluated))
    return rows


def held_out_curve(config: RunConfig) -> dict[int, float]:
    """What `validation.metric` was of each validated version, oldest first."""
    metric = config.validation.watched_metric
    validated = read_validations(config.run.path)
    return {version: m[metric] for version, m in validated.items() if m.get(metric) is not None}


def validation_text(config: RunConfig) -> str:
    """Such as: 0.250 -> 0.344 (greedy, 256 prompts; versions 0 and 40), best 0.375 of version 30;
    "" before the first one. What is not the mean reward has its name in front."""
    settings = config.validation
    metric, best_is = settings.watched_metric, settings.best_is
    validated = read_validations(config.run.path)
    known = held_out_curve(config)
    best = best_of(validated, metric, best_is)
    if best is None:
        return ""
    first, last = min(known), max(known)
    name = metric.removeprefix("validation/")
    name = "" if name.startswith("mean@") else f"{name} "
    is_greedy = settings.num_samples == 1 and settings.temperature == 0
    how = "greedy" if is_greedy else f"{settings.num_samples} samples"
    how += f", {validated[last].get('validation/num_prompts', 0):.0f} prompts"
    if first == last:
        return f"{name}{known[first]:.3f} ({how}; version {first})"
    versions = f"{how}; versions {first} and {last}"
    best_text = f", best {best.value:.3f} of version {best.policy_version}"
    return (
        f"{name}{known[first]:.3f} -> {known[last]:.3f} ({versions})"
        f"{'' if best.policy_version == last else best_text}"
    )


def held_out_reward(folder: Path) -> str:
    """Such as: 0.336 (greedy, 256 prompts, 2 failed; version 40); "" before an evaluation. What is
    no checkpoint has its name."""
    evaluation = read_json(folder / "evaluation.json")
    score, number = evaluation.get("greedy_reward_mean"), evaluation.get("num_prompts")
    failed = f", {evaluation['num_failed']} failed" if evaluation.get("num_failed") else ""
    model = str(evaluation.get("model", ""))
    version = Path(model).name.removeprefix("step-")
    of = f"; version {int(version)}" if version.isdecimal() else f"; {model}" if model else ""
    return "" if score is None else f"{score:.3f} (greedy, {number} prompts{failed}{of})"


def restart_rows(folder: Path) -> list[tuple[str, str]]:
    """Such as: restarts of learner, 3: was killed by SIGKILL (2 times); ValueError: oops."""
    rows = []
    for role, sentences in sorted(read_restarts(folder).items()):
        counts = Counter(sentences).items()
        reasons = (f"{reason} ({n} times)" if n > 1 else reason for reason, n in counts)
        rows.append((f"restarts of {role}", f"{len(sentences)}: {'; '.join(reasons)}"))
    return rows


def _length_rows(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the last window of steps, if its responses were counted."""
    names = ("sampled_length_mean", "trained_length_mean", "dropped_tokens_frac")
    sampled, trained, dropped = (last.get(f"fairness/{name}") for name in names)
    # A learner that has just gone on has seen none that was sampled.
    if not sampled or trained is None or dropped is None:
        return []
    lost = f", {100 * dropped:.1f} % of tokens dropped" if dropped else ""
    return [("response length, last steps", f"{sampled:.3g} sampled, {trained:.3g} trained{lost}")]
