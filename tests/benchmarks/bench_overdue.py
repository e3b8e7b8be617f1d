"""What `buffer.overdue` costs where every rollout has an accelerator to itself: a simulation.

    PYTHONPATH=. python tests/benchmarks/bench_overdue.py

A run on two cores cannot show it: there a learner that waits leaves its core to the generators.
Here the ledger is the real one and time is simulated. A step takes one second of the learner; a
response takes a log-normal time, one second in the mean and at most `CAP_S`; a group takes as long
as the longest of its `GROUP_SIZE` responses. Generators hold at most `slots` groups at a time, in
multiples of a batch. The synchronous run is the same with `max_staleness: 0`.

Prints one JSON line per setting: steps per second against the synchronous run, the fraction of
groups dropped, and the mean and largest staleness.
"""

import heapq
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from buffers.ledger.ledger import Ledger
from streamrl.types import GroupHeader, Lease, OverduePolicy

GROUPS_PER_STEP = 64
GROUP_SIZE = 8
NUM_STEPS = 200
STEP_S = 1.0
CAP_S = 20.0
SIGMAS = {"even": 0.3, "long-tailed": 1.0}


@dataclass(frozen=True)
class Setting:
    """`sigma` is that of the logarithm of a response's time; `slots` are groups."""

    sigma: float
    overdue: OverduePolicy
    max_staleness: int
    slots: int


@dataclass
class Simulation:
    """One run, from its first lease to its last step."""

    setting: Setting
    now_s: float = 0.0
    is_training: bool = False
    num_sampling: int = 0
    staleness: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.ledger = Ledger(
            groups_per_step=GROUPS_PER_STEP,
            max_staleness=self.setting.max_staleness,
            overdue=self.setting.overdue,
            final_version=NUM_STEPS,
        )
        self.learner_term = self.ledger.attach(0)
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, Lease | None, int]] = []

    def run(self) -> None:
        """Go from event to event: a group is finished, or a step is."""
        self._lease()
        while self.ledger.version < NUM_STEPS:
            self.now_s, _, lease, version = heapq.heappop(self.events)
            if lease is None:
                self.ledger.advance(version, self.learner_term)
                self.ledger.acknowledge(version, self.learner_term)
                self.is_training = False
            else:
                self._put(lease, version)
            self._lease()
            self._take()

    def _lease(self) -> None:
        while self.num_sampling < self.setting.slots:
            number = next(self.numbers)
            lease = self.ledger.lease(str(number), self.now_s, ttl_s=1e9)
            if lease is None:
                return
            self.num_sampling += 1
            self._schedule(self._group_s(), lease, self.ledger.version)

    def _put(self, lease: Lease, version: int) -> None:
        self.num_sampling -= 1
        header = GroupHeader(
            group_id=lease.lease_id,
            prompt_index=lease.prompt_index,
            environment="",
            oldest_version=version,
            newest_version=version,
            lengths=(1,),
            response_lengths=(1,),
            rewards=(0.0,),
        )
        self.ledger.put(lease.lease_id, header, self.now_s)

    def _take(self) -> None:
        version = self.ledger.version
        if self.is_training or version == NUM_STEPS:
            return
        if headers := self.ledger.take(GROUPS_PER_STEP, version, self.learner_term):
            self.is_training = True
            self.staleness += [version - header.oldest_version for header in headers]
            self._schedule(STEP_S, None, version + 1)

    def _schedule(self, seconds: float, lease: Lease | None, version: int) -> None:
        event = (self.now_s + seconds, next(self.numbers), lease, version)
        heapq.heappush(self.events, event)

    def _group_s(self) -> float:
        sigma = self.setting.sigma
        times = (self.random.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(GROUP_SIZE))
        return min(max(times), CAP_S)


def simulated(setting: Setting) -> Simulation:
    simulation = Simulation(setting)
    simulation.run()
    return simulation


def lines() -> Iterator[dict[str, object]]:
    for lengths, sigma in SIGMAS.items():
        synchronous = Setting(sigma, OverduePolicy.WAIT, 0, GROUPS_PER_STEP)
        fastest_s = simulated(synchronous).now_s
        grid = itertools.product((1, 2, 4, 8), (1, 2, 4), OverduePolicy)
        for max_staleness, batches, overdue in grid:
            setting = Setting(sigma, overdue, max_staleness, batches * GROUPS_PER_STEP)
            run = simulated(setting)
            num_dropped = sum(run.ledger.books().dropped.values())
            yield {
                "benchmark": "overdue",
                **{"lengths": lengths, "overdue": overdue, "max_staleness": max_staleness},
                "slots_in_batches": batches,
                "ratio": round(fastest_s / run.now_s, 2),
                "dropped_frac": round(num_dropped / (NUM_STEPS * GROUPS_PER_STEP), 3),
                "staleness_mean": round(sum(run.staleness) / len(run.staleness), 2),
                "staleness_max": max(run.staleness),
            }


if __name__ == "__main__":
    for line in lines():
        print(json.dumps(line), flush=True)
