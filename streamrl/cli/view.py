"""What a person sees of a run: a live view while it goes, a summary when it ends.

Reads the run folder and the children's states, nothing else, so it can follow any run and cannot
hold one up.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamrl.cli.processes import Child
from streamrl.config import RunConfig
from streamrl.run_folder import read_json
from streamrl.tracking.jsonl import read_metrics

REFRESH_S = 0.5
_RECENT = 20
_BARS = " ▁▂▃▄▅▆▇█"


class ProgressView:
    """The launch's view: live on a terminal, a line every few seconds elsewhere."""

    def __init__(
        self, config: RunConfig, children: Sequence[Child], console: Console, *, live: bool
    ) -> None:
        self._config = config
        self._children = children
        self._console = console
        self._live = live and console.is_terminal
        self._printed_s = 0.0

    async def run(self) -> None:
        """Until cancelled. Waits REFRESH_S between two readings of the run folder."""
        if not self._live:
            while True:
                self._print_line()
                await asyncio.sleep(REFRESH_S)
        with Live(self._render(), console=self._console, refresh_per_second=4) as screen:
            try:
                while True:
                    await asyncio.sleep(REFRESH_S)
                    screen.update(self._render())
            finally:
                screen.update(self._render())

    def _render(self) -> Group:
        states = {child.role: child.state for child in self._children}
        return render(self._config, _lines(self._config), states)

    def _print_line(self) -> None:
        lines = _lines(self._config)
        if lines and time.monotonic() - self._printed_s > 5.0:
            self._printed_s = time.monotonic()
            self._console.print(Text(headline(self._config, lines)))


def headline(config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> str:
    """Where the run is, in one line."""
    last = lines[-1]
    parts = [f"step {last['step']}/{config.run.max_steps}"]
    for label, name, digits in (
        ("reward", "reward/mean", 3),
        ("staleness", "buffer/staleness_mean", 2),
        ("ESS", "mismatch/rollout_is_eff_sample_size", 3),
        ("wait", "learner/wait_s", 2),
    ):
        if (value := _recent(lines, name)) is not None:
            parts.append(f"{label} {value:.{digits}f}")
    parts.append(f"{_recent(lines, 'generator/tokens_per_s') or 0:.0f} tokens/s")
    step_s = _recent(lines, "learner/step_s")
    if step_s is not None:
        parts.append(f"ETA {_clock((config.run.max_steps - last['step']) * step_s)}")
    return "  ".join(parts)


def render(
    config: RunConfig, lines: Sequence[Mapping[str, Any]], states: Mapping[str, str]
) -> Group:
    """The live view: progress, reward so far, and a row for each process."""
    table = Table(box=None, pad_edge=False)
    for column in ("process", "state", "tokens/s", "version", ""):
        table.add_column(column, justify="right" if column in ("tokens/s", "version") else "left")
    last: Mapping[str, Any] = lines[-1] if lines else {}
    for role, state in states.items():
        table.add_row(role, state, *_role_cells(role, last, lines))
    rewards = [line["reward/mean"] for line in lines if line.get("reward/mean") is not None]
    title = headline(config, lines) if lines else "starting: waiting for the first step"
    return Group(Text(title, style="bold"), Text(f"reward {sparkline(rewards)}"), table)


def summary(config: RunConfig, seconds: float) -> Table:
    """The table at the end of a run."""
    folder = config.run.path
    lines = read_metrics(folder / "metrics.jsonl")
    table = Table(title=f"{config.run.name}: summary", show_header=False)
    for name, value in summary_rows(lines, folder):
        table.add_row(name, value)
    table.add_row("wall time", _clock(seconds))
    table.add_row("run folder", str(folder))
    return table


def summary_rows(lines: Sequence[Mapping[str, Any]], folder: Path) -> list[tuple[str, str]]:
    """Name and value of each row; those that were not measured are left out."""
    if not lines:
        return [("steps", "0")]
    rows = [("steps", str(lines[-1]["step"]))]
    first, last = _mean(lines[:5], "reward/mean"), _mean(lines[-10:], "reward/mean")
    if first is not None and last is not None:
        rows.append(("mean reward of sampled rollouts", f"{first:.3f} -> {last:.3f}"))
    evaluation = read_json(folder / "evaluation.json")
    if evaluation:
        score, number = evaluation["greedy_reward_mean"], evaluation["num_prompts"]
        rows.append(("greedy reward, held out", f"{score:.3f} ({number} prompts)"))
    for label, name in (
        ("staleness, mean", "buffer/staleness_mean"),
        ("ESS, mean", "mismatch/rollout_is_eff_sample_size"),
        ("generated tokens/s, mean", "generator/tokens_per_s"),
        ("trained tokens/s, mean", "learner/tokens_per_s"),
        ("learner wait per step, mean", "learner/wait_s"),
    ):
        if (value := _mean(lines, name)) is not None:
            rows.append((label, f"{value:.3g}"))
    staleness = [line["buffer/staleness_max"] for line in lines if "buffer/staleness_max" in line]
    if staleness:
        rows.append(("staleness, largest", f"{max(staleness)}"))
    return [*rows, *books_rows(read_json(folder / "books.json"))]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values between 0 and their largest as bars, averaged into at most `width` of them."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [
        sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)
    ]
    highest = max(*means, 1e-9)
    bars = (_BARS[round(max(0.0, m) / highest * (len(_BARS) - 1))] for m in means)
    return "".join(bars) + f" {means[-1]:.3f}"


def books_rows(books: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The account as an equation, and whether it holds."""
    if not books:
        return []
    dropped = ", ".join(f"{reason} {count}" for reason, count in books["dropped"].items())
    columns = ("leased", "buffered", "taken", "trained", "acknowledged")
    parts = " + ".join(f"{books[name]} {name}" for name in columns if books[name])
    total = sum(books["dropped"].values())
    tail = f" + {total} dropped ({dropped})" if total else ""
    verdict = "the books close" if books["balanced"] else "THE BOOKS DO NOT CLOSE"
    return [("groups", f"{books['granted']} leased = {parts}{tail}"), ("", verdict)]


def _role_cells(
    role: str, last: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> tuple[str, str, str]:
    if role == "learner" and last:
        wait, step = _recent(lines, "learner/wait_s") or 0, _recent(lines, "learner/step_s") or 1
        rate = _recent(lines, "learner/tokens_per_s") or 0
        return f"{rate:.0f}", str(last["step"]), f"waits {100 * wait / max(step, 1e-9):.0f} %"
    if role == "buffer" and last:
        held = f"{last.get('buffer/leased', 0)} leased, {last.get('buffer/buffered', 0)} buffered"
        return "", "", held
    generated = _recent(lines, f"generator/{role}/tokens_per_s")
    version = last.get(f"generator/{role}/policy_version", "")
    return ("" if generated is None else f"{generated:.0f}", str(version), "")


def _lines(config: RunConfig) -> list[dict[str, Any]]:
    return read_metrics(config.run.path / "metrics.jsonl")


def _recent(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return _mean(lines[-_RECENT:], name)


def _mean(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
