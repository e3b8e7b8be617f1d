"""What a finished run's folder proves: every prompt trained once, or dropped with a reason.

Reads metrics.jsonl, trained.jsonl, the last checkpoint's books and books.json; works for any
buffer. In the surviving history a prompt below `next_prompt_index` is trained (trained.jsonl says
by which step), still open (the books list it), or was dropped for good (the books count it by
reason).

Pure but for reading; called by `streamrl.cli.chaos`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config import RunConfig
from streamrl.run_folder import read_json
from streamrl.tracking.jsonl import TRAINED_FILE, read_metrics
from streamrl.types import Books


@dataclass(frozen=True)
class Proof:
    """What was found, in a sentence, and what contradicts the promises; nothing, if they hold."""

    finding: str
    faults: tuple[str, ...]


def prove(config: RunConfig) -> Proof:
    """Of a run that has ended."""
    folder, max_steps = config.run.path, config.run.max_steps
    metrics = read_metrics(folder / "metrics.jsonl")
    trained = read_metrics(folder / TRAINED_FILE)
    state = _last_state(folder)
    faults = [*_step_faults("metrics.jsonl", metrics, max_steps)]
    faults += _step_faults(TRAINED_FILE, trained, max_steps)
    faults += _balance_faults(metrics, read_json(folder / "books.json"))
    if state.get("policy_version") != max_steps:
        found = state.get("policy_version", "none")
        faults.append(f"the last checkpoint is of version {found}, not of {max_steps}")
        return Proof(f"{len(metrics)} steps", tuple(faults))
    books = msgspec.convert(state["books"], Books, str_keys=True, strict=False)
    faults += _prompt_faults(trained, books, config.learner.groups_per_step)
    return Proof(_finding(trained, books), tuple(faults))


def _step_faults(name: str, lines: Sequence[Mapping[str, Any]], max_steps: int) -> Iterator[str]:
    counts = Counter(line["step"] for line in lines)
    if missing := sorted(set(range(1, max_steps + 1)) - counts.keys()):
        yield f"{name} lacks the steps {missing}"
    if repeated := sorted(step for step, count in counts.items() if count > 1):
        yield f"{name} has more than one line of the steps {repeated}"


def _balance_faults(
    metrics: Sequence[Mapping[str, Any]], final: Mapping[str, Any]
) -> Iterator[str]:
    if unbalanced := [line["step"] for line in metrics if line.get("buffer/books_balanced") != 1]:
        yield f"the books do not close at the steps {unbalanced}"
    if final and not final["balanced"]:
        yield "the buffer's last books (books.json) do not close"


def _prompt_faults(
    trained: Sequence[Mapping[str, Any]], books: Books, groups_per_step: int
) -> Iterator[str]:
    if not books.balanced:
        yield "the books of the last checkpoint do not close"
    steps: dict[int, list[int]] = {}
    for line in trained:
        if len(line["prompt_indices"]) != groups_per_step:
            yield f"step {line['step']} trained {len(line['prompt_indices'])} groups"
        for prompt_index in line["prompt_indices"]:
            steps.setdefault(prompt_index, []).append(line["step"])
    for prompt_index, at in steps.items():
        if len(at) > 1:
            yield f"prompt {prompt_index} was trained by the steps {at}"
    if again := sorted(steps.keys() & set(books.open_prompt_indices)):
        yield f"trained, yet still to be trained by the last checkpoint's books: {again}"
    if beyond := sorted(
        prompt_index for prompt_index in steps if prompt_index >= books.next_prompt_index
    ):
        yield f"trained, yet never granted by the last checkpoint's books: {beyond}"
    gone = set(range(books.next_prompt_index)) - steps.keys() - set(books.open_prompt_indices)
    if len(gone) > (dropped := _dropped_for_good(books)):
        told = f"neither trained nor open: {sorted(gone)}; the books know of {dropped} dropped"
        yield f"prompts are lost: {told} for good"
    finished = books.acknowledged + books.trained
    if finished != len(steps):
        yield f"the books call {finished} groups trained; {TRAINED_FILE} names {len(steps)}"


def _dropped_for_good(books: Books) -> int:
    return sum(count for reason, count in books.dropped.items() if not reason.returns_prompt)


def _finding(trained: Sequence[Mapping[str, Any]], books: Books) -> str:
    num_trained = sum(len(line["prompt_indices"]) for line in trained)
    dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(books.dropped.items()))
    gone = _dropped_for_good(books)
    return (
        f"{len(trained)} steps trained {num_trained} prompts; of {books.next_prompt_index} granted "
        f"{len(books.open_prompt_indices)} are open and {gone} dropped for good "
        f"({books.granted} leases; ended otherwise: {dropped or 'none'})"
    )


def _last_state(folder: Path) -> dict[str, Any]:
    paths = sorted((folder / "checkpoints").glob("step-*/state.json"))
    return read_json(paths[-1]) if paths else {}
