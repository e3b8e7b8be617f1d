"""Whether more generators or more learner ranks would make a run faster, and by how much.

A run is a closed queue of two stations: generators sample groups, the learner trains batches of
them, and admission bounds the groups between. Each station's demand is the time that it needs for
the groups of one step when all of its room is in use. It follows from measurements by the
utilization law:

    G = U T         U: the share in use of the usable room, min(n m, C) groups
    L = T - W       W: the time that the learner waited for groups
    T = G + L - o min(G, L) + s

for steps of T seconds, n generators with room for m groups each, and at most C admitted groups
((max_staleness + 1) * groups_per_step). The overlap o and the rest s, in which neither station is
fully used, are chosen to make the last equation true: o = 0 if the stations take turns
(max_staleness 0), o = 1 if the shorter one hides behind the longer one. At another size

    G' = G min(n m, C) / min(n' m, C)        L' = L - X + X r / r'

where X is the part of L that ranks share (`learner/train_s`) and r the number of ranks; T' follows
with the same o and s.

Assumptions: generators are alike; an engine samples a group equally fast, however many others it
samples; ranks share X evenly; o and s stay the same. So an estimate is best near the measured size,
and for more ranks it is an upper bound.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from msgspec import Struct, structs

from streamrl.types import GeneratorStatus

Limit: TypeAlias = Literal["generators", "learner", "both", "admission", "none"]
MIN_GAIN = 0.03
"""One more generator or rank helps if it gains at least this share of speed."""
_MIN_REST = 0.25


class Load(Struct, frozen=True, kw_only=True):
    """A run at one size, as means over steps: times in seconds a step, room in groups.

    `busy_groups` is the room in use over all `num_generators`; `max_groups` is all of their room,
    and `capacity` the most groups that admission lets in flight.
    """

    step_s: float
    wait_s: float
    train_s: float
    num_generators: int
    num_ranks: int
    max_groups: float
    busy_groups: float
    capacity: int

    @property
    def usable_groups(self) -> float:
        return min(self.max_groups, self.capacity)

    @property
    def generation_s(self) -> float:
        """G: the time that the generators need for the groups of a step."""
        return min(1.0, self.busy_groups / max(self.usable_groups, 1e-9)) * self.step_s

    @property
    def learner_s(self) -> float:
        """L: the time that the learner needs for a step, without waits."""
        return max(0.0, self.step_s - self.wait_s)

    @property
    def rest_s(self) -> float:
        """s: time in which groups wait elsewhere, such as for a reward, and no more are
        admitted."""
        return max(0.0, self.step_s - self.generation_s - self.learner_s)


def busy_frac(status: GeneratorStatus, before: GeneratorStatus | None = None) -> float:
    """Share of a generator's room in use since its earlier report, or since its start."""
    busy_s, uptime_s = status.busy_s, status.uptime_s
    if before is not None and before.session == status.session and before.uptime_s < uptime_s:
        busy_s, uptime_s = busy_s - before.busy_s, uptime_s - before.uptime_s
    return min(1.0, max(0.0, busy_s / uptime_s)) if uptime_s > 0 else 0.0


def steps_per_s(load: Load, *, generators: int = 0, ranks: int = 0) -> float:
    """Estimated speed with that many more (or fewer) generators and ranks; 0 and 0 give the speed
    of `load`."""
    generation_s, learner_s = load.generation_s, load.learner_s
    shorter_s = min(generation_s, learner_s)
    overlapped_s = max(0.0, generation_s + learner_s - load.step_s)
    overlap = min(1.0, overlapped_s / shorter_s) if shorter_s > 0 else 1.0
    each = load.max_groups / load.num_generators
    room = min(each * (load.num_generators + generators), load.capacity)
    generation_s *= load.usable_groups / max(room, 1e-9)
    shared_s = min(load.train_s, learner_s)
    learner_s += shared_s * (load.num_ranks / (load.num_ranks + ranks) - 1)
    step_s = generation_s + learner_s - overlap * min(generation_s, learner_s) + load.rest_s
    return 1 / max(step_s, 1e-9)


def wanted_generators(load: Load) -> int:
    """The smallest number of generators at which one more gains less than MIN_GAIN; at most twice
    as many as there are, since estimates hold near the measured size."""
    counts = range(1, 2 * load.num_generators + 2)
    speeds = [steps_per_s(load, generators=n - load.num_generators) for n in counts]
    gains = (after / before - 1 for before, after in pairwise(speeds))
    enough = (n for n, gain in zip(counts, gains, strict=False) if gain < MIN_GAIN)
    return next(enough, 2 * load.num_generators)


def scaling_metrics(load: Load | None) -> dict[str, float]:
    """The estimates under their public names; NaN before anything was measured."""
    if load is None:
        return dict.fromkeys(_NAMES, math.nan)
    values = (
        steps_per_s(load),
        steps_per_s(load, generators=1),
        steps_per_s(load, ranks=1),
        wanted_generators(load),
        load.rest_s / max(load.step_s, 1e-9),
        1 - load.busy_groups / max(load.max_groups, 1e-9),
    )
    return dict(zip(_NAMES, values, strict=True))


class ScalingHint(Struct, frozen=True):
    """What would make a run faster. `limit` is what limits its speed: `generators`, `learner`,
    `both` (they take turns), `admission`, or `none` if one more of either gains less than
    MIN_GAIN."""

    limit: Limit
    steps_per_s: float
    steps_per_s_generator_added: float
    steps_per_s_rank_added: float
    num_generators: int
    num_generators_wanted: int
    sentence: str


def scaling_hint(metrics: Mapping[str, Any]) -> ScalingHint | None:
    """Make the hint from the metrics of a step; None if they are not measured."""
    values = [metrics.get(name) for name in (*_NAMES, "generator/count")]
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    speed, more_generators, more_ranks, wanted, rest, _, count = (float(v or 0) for v in values)
    limit = _LIMITS[more_generators / speed - 1 >= MIN_GAIN, more_ranks / speed - 1 >= MIN_GAIN]
    room = metrics.get("generator/max_num_groups") or 0
    capacity = metrics.get("buffer/capacity") or 0
    waits = (metrics.get("learner/wait_s") or 0) / max(metrics.get("learner/step_s") or 0, 1e-9)
    if rest >= _MIN_REST or (limit == "none" and room > capacity and waits >= MIN_GAIN):
        limit = "admission"
    found = ScalingHint(limit, speed, more_generators, more_ranks, int(count), int(wanted), "")
    sentence = _sentence(found, int(room), int(capacity))
    free_cores = metrics.get(FREE_CORES)
    if limit in ("generators", "learner", "both") and free_cores is not None and free_cores < 1:
        sentence += "; no core of this machine is free for it, so it takes another machine"
    return structs.replace(found, sentence=sentence)


FREE_CORES = "scaling/free_cores"
_NAMES = (
    "scaling/steps_per_s",
    "scaling/steps_per_s_generator_added",
    "scaling/steps_per_s_rank_added",
    "scaling/num_generators_wanted",
    "scaling/rest_frac",
    "generator/idle_frac",
)


_LIMITS: Mapping[tuple[bool, bool], Limit] = {
    (True, True): "both",
    (True, False): "generators",
    (False, True): "learner",
    (False, False): "none",
}
"""The limit by whether one more generator helps, and whether one more rank does."""


def _sentence(hint: ScalingHint, room: int, capacity: int) -> str:
    generator = _raised("another generator", hint.steps_per_s_generator_added, hint.steps_per_s)
    rank = _raised("another learner rank", hint.steps_per_s_rank_added, hint.steps_per_s)
    wanted = hint.num_generators_wanted
    match hint.limit:
        case "generators":
            return (
                f"the generators limit the run: {generator}; from {wanted} on one more "
                f"gains less than {100 * MIN_GAIN:.0f} %"
            )
        case "learner":
            return f"the learner limits the run: {rank} at most; more generators gain nothing"
        case "both":
            return f"generators and learner take turns: {generator}, {rank} at most"
        case "admission":
            return (
                f"admission limits the run: {capacity} groups are let in flight, and generators "
                f"with room for {room} wait for more; raise buffer.max_staleness, or make rewards "
                "and environments faster"
            )
        case "none":
            return "generators and learner keep up with each other"


def _raised(what: str, to: float, speed: float) -> str:
    return f"{what} would raise {speed:.3g} steps/s to {to:.3g} (+{100 * (to / speed - 1):.0f} %)"
