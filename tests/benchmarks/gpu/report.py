"""`make gpu-report`: everything that only a GPU can show, in stages, within a few minutes.

    PYTHONPATH=. python -m tests.benchmarks.gpu.report [--small] [--limit-s 480]
        [--only learner,loop] [--folder runs/gpu-report] [--docs docs/benchmarks.md]

A stage is a command with a time of its own; it prints as it goes, its whole output is kept in
FOLDER/STAGE.log, and one that fails or has no time left leaves the others alone. The lines of JSON
that the stages print are FOLDER/report.json, and the tables FOLDER/report.md; `--docs` puts these
into a page between its two marks. `--small` runs the same stages on a CPU, each as small as it can
be, and so says whether the report would work. Exits with 1 if a stage failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = "tests/benchmarks"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
RESERVE_S = 5.0
END_S = 4.0

Line = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """`command` and `small` are arguments of Python; `columns` those of its table."""

    name: str
    limit_s: float
    command: Sequence[str]
    small: Sequence[str]
    columns: Sequence[str] = ()


_LEARNER = ("shape", "median", "case", "tokens_per_s", "ratio", "mfu", "step_s", "peak_gb")
STAGES = (
    Stage(
        "tests",
        90,
        ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"),
        ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"),
    ),
    Stage(
        "learner",
        150,
        (f"{BENCHMARKS}/gpu/learner.py", "--budget-s", "120"),
        (f"{BENCHMARKS}/gpu/learner.py", "--small"),
        _LEARNER,
    ),
    Stage(
        "logprobs",
        80,
        (f"{BENCHMARKS}/bench_logprobs.py",),
        (f"{BENCHMARKS}/bench_logprobs.py", "--tokens", "16", "--vocabulary", "4096"),
        (
            *("way", "dtype", "tokens", "seconds", "extra_mib", "ratio", "memory_ratio"),
            *("logprob_error", "gradient_error"),
        ),
    ),
    Stage(
        "weights",
        60,
        (
            f"{BENCHMARKS}/bench_weights.py",
            *("--sizes", "1000", "--receivers", "1", "--cases", "shared", "gpu"),
        ),
        (
            f"{BENCHMARKS}/bench_weights.py",
            *("--sizes", "1", "--receivers", "1", "--rounds", "1", "--cases", "shared"),
        ),
        ("case", "mb", "receive_s", "total_s", "pause_s", "ratio"),
    ),
    Stage(
        "generation",
        120,
        (f"{BENCHMARKS}/gpu/generation.py", "--rounds", "1"),
        (f"{BENCHMARKS}/gpu/generation.py", "--small", "--rounds", "1", "--requests", "32"),
        ("workload", "requests", "bare_tokens_per_s", "tokens_per_s", "ratio", "target"),
    ),
    Stage(
        "loop",
        120,
        (f"{BENCHMARKS}/gpu/loop.py", "--limit-s", "100"),
        (f"{BENCHMARKS}/gpu/loop.py", "--small", "--limit-s", "60"),
        (
            *("engine", "steps", "step_s", "train_s", "wait_s", "update_s", "pause_s"),
            *("tokens_per_s", "mfu", "mismatch_k3_kl"),
        ),
    ),
    Stage(
        "learning",
        60,
        (
            f"{BENCHMARKS}/gpu/learning.py",
            # To compile the layers would take longer than the steps.
            *("--steps", "300", "--device", "cuda:0", "--set", "learner.compile=false"),
        ),
        (
            f"{BENCHMARKS}/gpu/learning.py",
            *("--steps", "3", "--device", "cpu", "--set", "learner.optimizer.warmup_steps=0"),
        ),
        ("steps", "seconds", "first_reward", "last_reward", "rewards"),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """`said` is why a stage has no figures, or pytest's last line."""

    stage: Stage
    ok: bool
    seconds: float
    said: str
    lines: Sequence[Line]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit-s", type=float, default=480.0)
    parser.add_argument("--only", default=",".join(stage.name for stage in STAGES))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu-report")
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args(words)
    options.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.limit_s
    chosen = [stage for stage in STAGES if stage.name in options.only.split(",")]
    outcomes = []
    for stage in chosen:
        outcomes.append(run(stage, options.folder, deadline, small=options.small))
        # Written after each, so that a machine that goes away leaves what there is.
        write(outcomes, options.folder, options.docs)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def run(stage: Stage, folder: Path, deadline: float, *, small: bool) -> Outcome:
    """Waits for the stage's end, or until its time is over."""
    left = min(stage.limit_s, deadline - time.monotonic() - RESERVE_S)
    if left <= 0:
        print(f"== {stage.name}: no time left", flush=True)
        return Outcome(stage, False, 0.0, "no time left", ())
    print(f"== {stage.name} ({left:.0f} s)", flush=True)
    start, log = time.monotonic(), folder / f"{stage.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *(stage.small if small else stage.command)],
            cwd=ROOT,
            # What a stage has printed counts, also if it is ended.
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(left)
        except subprocess.TimeoutExpired:
            end(process)
            code = None
    text = log.read_text(errors="replace")
    lines = list(json_lines(text))
    seconds = time.monotonic() - start
    said = reason(stage, code, text, left)
    failed = [line for line in lines if "error" in line]
    print(text[-3000:] if code else "\n".join(map(json.dumps, lines)) or said, flush=True)
    return Outcome(stage, code in (0, 5) and not failed, round(seconds, 1), said, lines)


def end(process: subprocess.Popen[bytes]) -> None:
    """Waits END_S at most for what it says at its end: pytest names the tests that failed."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def json_lines(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        if line.startswith('{"benchmark"'):
            yield json.loads(line)


def reason(stage: Stage, code: int | None, text: str, limit_s: float) -> str:
    last = (text.strip().splitlines() or [""])[-1].strip("= ")
    ended = f"ended after {limit_s:.0f} s" if code is None else ""
    if stage.name == "tests":
        return f"{ended}: {last}" if ended else last
    if ended:
        return ended
    return "" if code == 0 else f"exit code {code}: {last[:200]}"


def write(outcomes: Sequence[Outcome], folder: Path, page: Path | None) -> None:
    about = machine()
    record = {
        **about,
        "stages": {
            o.stage.name: {"ok": o.ok, "seconds": o.seconds, "said": o.said, "lines": o.lines}
            for o in outcomes
        },
    }
    (folder / "report.json").write_text(json.dumps(record, indent=1) + "\n")
    text = "\n".join(tables(about, outcomes))
    (folder / "report.md").write_text(text + "\n")
    if page is not None and about["gpu"]:
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def machine() -> Line:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    known = subprocess.run(commit, capture_output=True, text=True, check=False).stdout.strip()
    today = time.strftime("%Y-%m-%d")
    return {"gpu": gpu, "torch": torch.__version__, "commit": known, "date": today}


def tables(about: Line, outcomes: Sequence[Outcome]) -> Iterator[str]:
    device = about["gpu"] or "no GPU: nothing here is a figure"
    commit = about["commit"] or "unknown"
    yield f"{device}, torch {about['torch']}, commit {commit}, {about['date']}."
    for outcome in outcomes:
        yield ""
        yield f"**{outcome.stage.name}** ({outcome.seconds:g} s)" + (
            f": {outcome.said}" if outcome.said else ""
        )
        columns = [c for c in outcome.stage.columns if any(c in line for line in outcome.lines)]
        if not columns:
            continue
        yield ""
        yield "| " + " | ".join(columns) + " |"
        yield "|" + "---|" * len(columns)
        for line in outcome.lines:
            cells = [shown(line.get(column)) for column in columns]
            note = line.get("error") or line.get("skipped")
            cells[-1] = f"{cells[-1]} ({shown(note).strip()})".strip() if note else cells[-1]
            yield "| " + " | ".join(cells) + " |"


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    raise SystemExit(main())
