"""Siblings that are sampled beyond `generator.group_size`: which of them are kept.

Invariant: what is not kept is counted, with the tokens that were sampled in it, so that the learner
can compare the lengths of what it trains with those of what was sampled.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


async def first_finished(
    siblings: Iterable[Coroutine[Any, Any, Result]], count: int
) -> list[Result | None]:
    """The results of the first `count` that finish, None for the others, which are canceled.

    Waits for that many. The first error before that cancels all and is raised.
    """
    tasks = [asyncio.ensure_future(sibling) for sibling in siblings]
    finished: list[asyncio.Future[Result]] = []
    running = set(tasks)
    try:
        while len(finished) < count:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finished += [task for task in tasks if task in done]
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    kept = finished[:count]
    return [task.result() if task in kept else None for task in tasks]


def first_of_each(rewards: Sequence[float], count: int) -> list[int]:
    """The places of `count` rewards: the first of each value, then the second of each, and so on.

    Ascending. Those of one round that does not fit as a whole are taken in their order.
    """
    seen: Counter[float] = Counter()
    rounds = []
    for place, reward in enumerate(rewards):
        rounds.append((seen[reward], place))
        seen[reward] += 1
    return sorted(place for _, place in sorted(rounds)[:count])
