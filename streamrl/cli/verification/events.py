"""What the buffer's events say, against the steps and the newest checkpoint of the run's folder.

The events are read before the folder, so that a checkpoint that the buffer has heard of is found.
"""

from collections.abc import Iterator, Mapping, Sequence

from buffers.audit import EventAudit
from streamrl.checkpoints.find import Checkpoint
from streamrl.checkpoints.history import finished
from streamrl.tracking.jsonl import TRAINED_FILE
from streamrl.types.index_ranges import members


def event_faults(
    events: EventAudit,
    steps: Mapping[int, Sequence[int]],
    checkpoint: Checkpoint | None,
    *,
    has_ended: bool,
) -> Iterator[str]:
    """`steps` are the prompts that each step of the surviving history has trained."""
    contained: set[int] = set()
    before: set[int] = set()
    newest = "there is none"
    if checkpoint is not None:
        contained = set(members(finished(checkpoint.books)))
        before = set(members(checkpoint.history.finished_before))
        newest = f"version {checkpoint.policy_version}"
    acknowledged = {i for i, prompt in events.prompts.items() if prompt.is_acknowledged}
    if beyond := sorted(acknowledged - contained):
        yield f"acknowledged beyond the newest checkpoint ({newest}): {beyond}"
    trained = {prompt_index for prompts in steps.values() for prompt_index in prompts}
    by_training = {i for i in acknowledged if not events.prompts[i].by_books}
    if missing := sorted(by_training - trained - before - set(beyond)):
        yield f"acknowledged, and no line of {TRAINED_FILE} has trained them: {missing}"
    waiting = {i for i, prompt in events.prompts.items() if prompt.may_be_trained}
    if has_ended and (again := sorted(contained & waiting)):
        yield f"finished in the newest checkpoint, and the buffer would lend them again: {again}"
