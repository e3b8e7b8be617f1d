"""The files of a run that has ended: every prompt was trained once, or dropped with a reason.

Reads metrics.jsonl, trained.jsonl, the books of the last checkpoint, and books.json; works for any
buffer. Of the prompts below `next_prompt_index`, each is trained (trained.jsonl names the step),
open (the checkpoint's books list it), or dropped for good (they count it by reason).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from streamrl.run_folder import BOOKS_FILE, read_json
from streamrl.tracking.jsonl import TRAINED_FILE, read_metrics
from streamrl.types import Books


@dataclass(frozen=True)
class FolderCheck:
    """The sums in a sentence, and a sentence for each thing that contradicts the promises."""

    finding: str
    faults: tuple[str, ...]


def check_folder(folder: Path, last_step: int, groups_per_step: int | None = None) -> FolderCheck:
    """Of a run that has ended with this step; `groups_per_step` if all its steps had the same."""
    metrics = read_metrics(folder / "metrics.jsonl")
    trained = read_metrics(folder / TRAINED_FILE)
    state = _last_state(folder)
    faults = [
        *_step_faults("metrics.jsonl", metrics, last_step),
        *_step_faults(TRAINED_FILE, trained, last_step),
        *_balance_faults(metrics, read_json(folder / BOOKS_FILE)),
    ]
    version = state.get("policy_version")
    if version != last_step:
        checkpoint = "none" if version is None else version
        faults.append(f"the last checkpoint is of version {checkpoint}, not of {last_step}")
        return FolderCheck(f"{len(metrics)} steps", tuple(faults))
    books = msgspec.convert(state["books"], Books, str_keys=True, strict=False)
    faults += _prompt_faults(trained, books, groups_per_step)
    return FolderCheck(_finding(trained, books), tuple(faults))


def _step_faults(name: str, lines: Sequence[Mapping[str, Any]], last_step: int) -> Iterator[str]:
    counts = Counter(line["step"] for line in lines)
    if missing := sorted(set(range(1, last_step + 1)) - counts.keys()):
        yield f"{name} lacks the steps {missing}"
    if repeated := sorted(step for step, count in counts.items() if count > 1):
        yield f"{name} has more than one line of the steps {repeated}"


def _balance_faults(
    metrics: Sequence[Mapping[str, Any]], final: Mapping[str, Any]
) -> Iterator[str]:
    if unbalanced := [line["step"] for line in metrics if line.get("buffer/books_balanced") != 1]:
        yield f"the books do not close at the steps {unbalanced}"
    if final and not final["balanced"]:
        yield f"the buffer's last books ({BOOKS_FILE}) do not close"


def _prompt_faults(
    trained: Sequence[Mapping[str, Any]], books: Books, groups_per_step: int | None
) -> Iterator[str]:
    if not books.balanced:
        yield "the books of the last checkpoint do not close"
    for line in trained:
        num_groups = len(line["prompt_indices"])
        if groups_per_step is not None and num_groups != groups_per_step:
            yield f"step {line['step']} trained {num_groups} groups, not {groups_per_step}"
    steps = _steps_of_prompts(trained)
    for prompt_index, at in steps.items():
        if len(at) > 1:
            yield f"prompt {prompt_index} was trained by the steps {at}"
    yield from _contradictions(steps, books)


def _contradictions(steps: Mapping[int, Sequence[int]], books: Books) -> Iterator[str]:
    """Where the trained prompts and the books of the last checkpoint do not fit."""
    still_open = set(books.open_prompt_indices)
    if again := sorted(steps.keys() & still_open):
        yield f"trained, yet still to be trained by the last checkpoint's books: {again}"
    if beyond := sorted(index for index in steps if index >= books.next_prompt_index):
        yield f"trained, yet never granted by the last checkpoint's books: {beyond}"
    ended = set(range(books.next_prompt_index)) - steps.keys() - still_open
    if len(ended) > (dropped := _dropped_for_good(books)):
        yield (
            f"prompts are lost: neither trained nor open: {sorted(ended)}; the books count "
            f"{dropped} dropped for good"
        )
    finished = books.acknowledged + books.trained
    if finished != len(steps):
        yield f"the books count {finished} trained groups; {TRAINED_FILE} names {len(steps)}"


def _steps_of_prompts(trained: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """The steps that trained each prompt."""
    steps: dict[int, list[int]] = {}
    for line in trained:
        for prompt_index in line["prompt_indices"]:
            steps.setdefault(prompt_index, []).append(line["step"])
    return steps


def _dropped_for_good(books: Books) -> int:
    return sum(count for reason, count in books.dropped.items() if not reason.returns_prompt)


def _finding(trained: Sequence[Mapping[str, Any]], books: Books) -> str:
    num_trained = sum(len(line["prompt_indices"]) for line in trained)
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(books.dropped.items()))
    return (
        f"{len(trained)} steps trained {num_trained} prompts; of {books.next_prompt_index} granted "
        f"{len(books.open_prompt_indices)} are open and {_dropped_for_good(books)} dropped for "
        f"good ({books.granted} leases; dropped: {reasons or 'none'})"
    )


def _last_state(folder: Path) -> dict[str, Any]:
    paths = sorted((folder / "checkpoints").glob("step-*/state.json"))
    return read_json(paths[-1]) if paths else {}
