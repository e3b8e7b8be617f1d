"""All ranks of a learner that write one checkpoint, each its part.

Invariant: they do it in lockstep, and an error of one rank is raised by all, so that none waits
for another that has given up. Waits for the other ranks: unblocked by their part, or by their end,
since their connections then close.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from learners.checkpoints.shards import Group
from streamrl.errors import StreamRLError

Result = TypeVar("Result")


class WritingRanks:
    """`group` is None for a world of one. All ranks make theirs together."""

    def __init__(self) -> None:
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        # Of its own, since messages of a writing thread must not mix with those of a step.
        self.group: Group = None if is_alone else dist.new_group(backend="gloo")
        self.rank = 0 if is_alone else dist.get_rank()

    def run(self, work: Callable[[], Result]) -> list[Result]:
        """The result of each rank, in order.

        Raises:
            OSError, SafetensorError, StreamRLError: a rank's work has raised it.
        """
        mine: tuple[Result | None, Exception | None]
        try:
            mine = (work(), None)
        except (OSError, SafetensorError, StreamRLError) as error:
            mine = (None, error)
        outcomes = [mine]
        if self.group is not None:
            outcomes = [mine] * dist.get_world_size(self.group)
            dist.all_gather_object(outcomes, mine, group=self.group)
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        results: list[Result] = [result for result, _ in outcomes]  # type: ignore[misc]
        return results
