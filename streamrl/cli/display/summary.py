"""The summary of a run: a table made from the files of its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from streamrl.cli.display.books import books_rows
from streamrl.cli.display.numbers import duration, metric_mean
from streamrl.config import RunConfig
from streamrl.run_folder import read_books, read_json
from streamrl.tracking.jsonl import read_metrics


def summary(config: RunConfig, seconds: float) -> Table:
    """The table at the end of a run."""
    folder = config.run.path
    lines = read_metrics(folder / "metrics.jsonl")
    table = Table(title=f"{config.run.name}: summary", show_header=False)
    for name, value in summary_rows(lines, folder):
        table.add_row(name, value)
    table.add_row("wall time", duration(seconds))
    table.add_row("run folder", str(folder))
    return table


def summary_rows(lines: Sequence[Mapping[str, Any]], folder: Path) -> list[tuple[str, str]]:
    """Name and value of each row; those that were not measured are left out."""
    if not lines:
        return [("steps", "0")]
    rows = [("steps", str(lines[-1]["step"]))]
    # At most a third each, so that the two means of a short run share no step.
    part = max(1, len(lines) // 3)
    first = metric_mean(lines[: min(5, part)], "reward/mean")
    last = metric_mean(lines[-min(10, part) :], "reward/mean")
    if first is not None and last is not None:
        rows.append(("mean reward of sampled rollouts", f"{first:.3f} -> {last:.3f}"))
    if evaluation := read_json(folder / "evaluation.json"):
        score, number = evaluation["greedy_reward_mean"], evaluation["num_prompts"]
        rows.append(("greedy reward, held out", f"{score:.3f} ({number} prompts)"))
    for label, name in (
        ("staleness, mean", "buffer/staleness_mean"),
        ("ESS, mean", "mismatch/rollout_is_eff_sample_size"),
        ("generated tokens/s, mean", "generator/tokens_per_s"),
        ("trained tokens/s, mean", "learner/tokens_per_s"),
        ("learner wait per step, mean", "learner/wait_s"),
    ):
        if (value := metric_mean(lines, name)) is not None:
            rows.append((label, f"{value:.3g}"))
    staleness = [line["buffer/staleness_max"] for line in lines if "buffer/staleness_max" in line]
    if staleness:
        rows.append(("staleness, largest", f"{max(staleness)}"))
    rows += _length_rows(lines[-1])
    books = read_books(folder)
    return rows if books is None else [*rows, *books_rows(books)]


def _length_rows(last: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the last window of steps, if its responses were counted."""
    names = ("sampled_length_mean", "trained_length_mean", "dropped_tokens_frac")
    sampled, trained, dropped = (last.get(f"fairness/{name}") for name in names)
    if sampled is None or trained is None or dropped is None:
        return []
    lost = f", {100 * dropped:.1f} % of tokens dropped" if dropped else ""
    return [("response length, last steps", f"{sampled:.3g} sampled, {trained:.3g} trained{lost}")]
