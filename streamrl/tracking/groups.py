"""Groups of metrics and the charts of each: the same on the page of a run, in TensorBoard and W&B.

A metric belongs to the group that its name begins with, which is also a section of W&B and of
TensorBoard's scalars, and part of its name in Prometheus. The charts are those of the page and of
TensorBoard's custom scalars.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from streamrl.metrics import STALENESS_BUCKETS

Kind: TypeAlias = Literal["lines", "shares", "sums"]
"""`shares` and `sums` are stacked; shares are parts of their sum."""


class Chart(NamedTuple):
    """`metrics` are regular expressions of whole names; the label of a metric is the part of its
    name that a group in parentheses matches, or the whole name."""

    title: str
    metrics: tuple[str, ...]
    kind: Kind = "lines"
    note: str = ""


class MetricGroup(NamedTuple):
    """Of all metrics whose names begin with `name/`; those in no chart come after the charts."""

    name: str
    title: str
    charts: tuple[Chart, ...] = ()


_LAG = "Staleness 0 is what the engine costs, the others what lag costs."
GROUPS = (
    MetricGroup(
        "reward",
        "Reward",
        (
            Chart("Training reward", ("reward/(mean)",)),
            Chart("Groups whose rewards are all alike", ("reward/(groups_alike_frac)",)),
        ),
    ),
    MetricGroup(
        "validation",
        "Validation",
        (Chart("Held-out prompts, by version", (r"validation/(.*@.*)",)),),
    ),
    MetricGroup(
        "buffer",
        "Staleness and buffer",
        (
            Chart("Staleness in versions", (r"buffer/staleness_(mean|max|min)",)),
            Chart(
                "Groups of a step by staleness",
                tuple(f"buffer/staleness_({b})/num_groups" for b in STALENESS_BUCKETS),
                "shares",
            ),
            Chart("Groups in flight by state", (r"buffer/(leased|buffered|taken)",), "sums"),
            Chart("Groups dropped so far, by reason", (r"buffer/dropped_(\w+)",)),
        ),
    ),
    MetricGroup(
        "mismatch",
        "Effective sample size and mismatch",
        (
            Chart(
                "Effective sample size", (r"mismatch/rollout_is_((?:applied_)?eff_sample_size)",)
            ),
            Chart(
                "Effective sample size by staleness",
                (r"mismatch/staleness_(\w+)/eff_sample_size",),
                note=_LAG,
            ),
            Chart("KL of behavior and training policy", (r"mismatch/mismatch_(k3_kl|kl)",)),
            Chart("KL by staleness", (r"mismatch/staleness_(\w+)/kl",), note=_LAG),
            Chart("KL of engine mismatch and of policy lag", (r"mismatch/(engine|lag)_k3_kl",)),
        ),
    ),
    MetricGroup(
        "generator",
        "Generators",
        (
            Chart("Sampled tokens per second", (r"generator/([^/]+)/tokens_per_s",), "sums"),
            Chart("Share of the generators' room that is not in use", (r"generator/(idle_frac)",)),
            Chart("Version", (r"generator/([^/]+)/policy_version", "learner/(policy_version)")),
        ),
    ),
    MetricGroup(
        "learner",
        "Learner",
        (
            Chart("Tokens per second of computing", (r"learner/(tokens_per_s)",)),
            Chart("Share of the time that it waits", (r"learner/(wait_frac)",)),
            Chart(
                "Time of a step in seconds",
                (r"learner/(wait|plan|score|forward|backward|update|snapshot|save)_s",),
                "sums",
            ),
            Chart("Gradient norm", (r"learner/(grad_norm)",)),
        ),
    ),
    MetricGroup(
        "weights",
        "Weight updates",
        (
            Chart(
                "Seconds of each hop",
                (r"weights/(snapshot|ready_wait|transfer|receive|load|pause)_s",),
            ),
            Chart("Failures so far", (r"weights/num_(failed_loads|fenced|refused_messages)",)),
        ),
    ),
    MetricGroup(
        "fairness",
        "Response lengths by outcome",
        (
            Chart("Mean in tokens", (r"fairness/(sampled|trained|dropped)_length_mean",)),
            Chart("99th percentile", (r"fairness/(sampled|trained|dropped)_length_p99",)),
        ),
    ),
    MetricGroup(
        "scaling",
        "What would make it faster",
        (
            Chart(
                "Steps per second: now, and with one more of each",
                (r"scaling/(steps_per_s|steps_per_s_generator_added|steps_per_s_rank_added)",),
            ),
        ),
    ),
    MetricGroup("response_length", "Response lengths"),
    MetricGroup("actor", "Loss", (Chart("Entropy", (r"actor/(entropy)",)),)),
    MetricGroup(
        "router",
        "Experts",
        (
            Chart("Experts that engine and learner differ in", (r"router/(mismatch_frac)",)),
            Chart("Load", (r"router/(busiest_expert_share|load_entropy)",)),
        ),
    ),
    MetricGroup("critic", "Critic"),
    MetricGroup("advantage", "Advantages"),
    MetricGroup("episode", "Episodes"),
)

OVERVIEW = (
    Chart("Response length in tokens", (r"response_length/(mean|max)",)),
    Chart("Staleness in versions", (r"buffer/staleness_(mean|max)",)),
    Chart("Effective sample size", (r"mismatch/rollout_is_(eff_sample_size)",)),
    Chart("Entropy", (r"actor/(entropy)",)),
    Chart("Time of a step in seconds", (r"learner/(wait|train|snapshot|save)_s",), "sums"),
    Chart(
        "Share of the time without work",
        (r"(generator)/idle_frac", r"(learner)/wait_frac"),
        note="Generators that have room for more groups, and a learner that waits for them.",
    ),
)
"""What the page shows first, below the reward."""


def grouped(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Those that belong to a group: all but the time of the line."""
    return {name: value for name, value in metrics.items() if "/" in name}


def groups_of(names: Iterable[str]) -> Iterator[MetricGroup]:
    """Those that have one of these metrics, in their order; those of the user's own come last."""
    known = {group.name: group for group in GROUPS}
    found = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
    yield from (group for name, group in known.items() if name in found)
    yield from (MetricGroup(name, name) for name in found if name not in known)


def label_of(chart: Chart, name: str) -> str | None:
    """The label of a metric in the chart; None if it is not in it."""
    for pattern in chart.metrics:
        if found := re.fullmatch(pattern, name):
            return next(iter(found.groups()), name)
    return None
