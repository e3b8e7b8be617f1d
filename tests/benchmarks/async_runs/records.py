"""What a finished run left in its folder, and the log of its reward function.

Invariant: the log is written by the task's own reward, so what was sampled is known from outside
the system that is measured.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffers.journal.sqlite import journal_path, open_to_read, read_events
from streamrl.interfaces import PromptSource
from streamrl.tracking.jsonl import TRAINED_FILE, read_metrics
from streamrl.types import DropReason

Line = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """`metrics` [steps]; prompt indices in the order they were `trained`; the reason by index of
    those `dropped`; the response lengths [group_size] of every group that was `sampled`."""

    metrics: Sequence[Line]
    trained: Sequence[int]
    dropped: Mapping[int, str]
    sampled: Mapping[int, Sequence[int]]


def read_record(run: Path, sampled_log: Path, prompts: PromptSource) -> RunRecord:
    """Of a run that has ended.

    Raises:
        ValueError: a prompt was not the one that its index stands for.
    """
    trained = [i for line in read_metrics(run / TRAINED_FILE) for i in line["prompt_indices"]]
    with open_to_read(journal_path(run)) as db:
        dropped = {
            event.prompt_index: event.reason
            for event in read_events(db)
            if event.reason and event.state == "dropped" and is_lost(event.reason)
        }
    metrics = read_metrics(run / "metrics.jsonl")
    return RunRecord(metrics, trained, dropped, read_sampled(sampled_log, prompts))


def is_lost(reason: str) -> bool:
    """Whether the prompt of a group that was dropped for this reason is not sampled again."""
    return not DropReason(reason).returns_prompt


def read_sampled(log: Path, prompts: PromptSource) -> dict[int, Sequence[int]]:
    """Response lengths by prompt index; the last ones of a prompt that was sampled twice."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    for prompt_index, content, _ in lines:
        if prompts[prompt_index].content != content:
            raise ValueError(f"prompt {prompt_index} was {content!r}, not that of its index")
    return {prompt_index: lengths for prompt_index, _, lengths in lines}
