"""From the names of metrics.jsonl to those of Prometheus: one table, and a rule for all others.

Names begin with `streamrl_`, units are seconds, bytes and ratios, and counters end with `_total`. A
name that no row matches keeps its words: `learner/grad_norm` is `streamrl_learner_grad_norm`.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from streamrl.metrics import OWN, find

Kind: TypeAlias = Literal["gauge", "counter", "sum", "histogram"]
"""`counter`: a running total already; `sum`: of a step, added up; `histogram`: so by bucket."""

STALENESS = "group_staleness_versions"


class MetricRow(NamedTuple):
    """`pattern` matches a metric's whole name; its named groups are labels, `{}` in `family` is its
    one group without a name."""

    pattern: str
    kind: Kind
    family: str
    text: str


class Family(NamedTuple):
    """What a metric is to Prometheus; `name` lacks the prefix and, of a counter, `_total`."""

    name: str
    kind: Kind
    text: str
    labels: tuple[tuple[str, str], ...] = ()


ROWS = (
    MetricRow(
        r"buffer/(?P<state>leased|buffered|taken|trained)",
        "gauge",
        "buffer_groups",
        "Groups by state; trained ones wait for a checkpoint.",
    ),
    MetricRow("buffer/granted", "counter", "buffer_leases_granted", "Leases granted."),
    MetricRow(
        "buffer/acknowledged", "counter", "buffer_groups_acknowledged", "Groups done for good."
    ),
    MetricRow(
        r"buffer/dropped_(?P<reason>\w+)", "counter", "buffer_groups_dropped", "Groups dropped."
    ),
    MetricRow(
        r"buffer/refused_(?P<reason>\w+)",
        "counter",
        "buffer_messages_refused",
        "Messages that the buffer did not accept.",
    ),
    MetricRow("buffer/books_balanced", "gauge", "buffer_books_balanced", "1 if the books close."),
    MetricRow("buffer/num_bytes", "gauge", "buffer_payload_bytes", "Size of the groups that wait."),
    MetricRow(
        r"buffer/staleness_(?P<statistic>mean|max|min)",
        "gauge",
        "learner_staleness_versions",
        "Versions between sampling and training of the last step's groups.",
    ),
    MetricRow(
        r"buffer/staleness_(?P<bucket>\w+)/num_groups",
        "histogram",
        STALENESS,
        "Versions between sampling and training of the trained groups.",
    ),
    MetricRow(
        "buffer/staleness_sum", "histogram", STALENESS, "Versions between sampling and training."
    ),
    MetricRow("generator/count", "gauge", "buffer_generators", "Generators that report."),
    MetricRow(
        r"generator/num_(active|waiting)",
        "gauge",
        "buffer_generators_{}_sequences",
        "Sequences of all generators together.",
    ),
    MetricRow(
        "generator/idle_frac", "gauge", "generators_idle_ratio", "Room of generators not in use."
    ),
    MetricRow(
        "generator/max_num_groups",
        "gauge",
        "buffer_generators_max_groups",
        "Groups that all generators together have room for.",
    ),
    MetricRow("buffer/capacity", "gauge", "buffer_capacity_groups", "Most groups in flight."),
    MetricRow(
        "generator/num_lost_agents",
        "gauge",
        "buffer_generators_lost_agents",
        "Groups whose agent disappeared, in the generators that report.",
    ),
    MetricRow(
        "generator/tokens_per_s",
        "gauge",
        "learner_sampled_tokens_per_second",
        "Response tokens that reached the buffer during the last step.",
    ),
    MetricRow(
        r"generator/(?P<generator>[^/]+)/policy_version",
        "gauge",
        "buffer_generator_policy_version",
        "Version of each generator, by its last heartbeat.",
    ),
    MetricRow(
        r"generator/(?P<generator>[^/]+)/tokens_per_s",
        "gauge",
        "buffer_generator_tokens_per_second",
        "Tokens that each generator samples, over its last minute.",
    ),
    MetricRow(
        r"generator/(?P<generator>[^/]+)/heartbeat_age_s",
        "gauge",
        "buffer_generator_heartbeat_age_seconds",
        "Time since the last heartbeat of each generator.",
    ),
    MetricRow(
        r"mismatch/staleness_(?P<staleness>[^/]+)/(\w+)",
        "gauge",
        "mismatch_by_staleness_{}",
        "Importance weights by staleness: 0 is what the engine costs, the others what lag costs.",
    ),
    MetricRow(
        r"mismatch/mismatch_(\w+)",
        "gauge",
        "mismatch_{}",
        "Distance between behavior and training policy, in the last step.",
    ),
    MetricRow(
        r"weights/(?P<hop>snapshot|ready_wait|transfer|receive|load|pause)_s",
        "gauge",
        "weights_hop_seconds",
        "Time of each hop of the last weight update, of the slowest generator.",
    ),
    MetricRow(
        "weights/num_receivers", "gauge", "weights_receivers", "Generators on the weight channel."
    ),
    MetricRow(
        "weights/num_behind", "gauge", "weights_receivers_behind", "Those that have not answered."
    ),
    MetricRow("weights/num_fenced", "counter", "weights_receivers_fenced", "Receivers left out."),
    MetricRow("weights/num_failed_loads", "counter", "weights_failed_loads", "Updates not loaded."),
    MetricRow("weights/store_s", "gauge", "weights_store_seconds", "From snapshot to the store."),
    MetricRow("weights/store_bytes", "gauge", "weights_store_bytes", "Of the last version there."),
    MetricRow(
        "weights/num_store_failures",
        "counter",
        "weights_store_failures",
        "Versions that weights.store did not take.",
    ),
    MetricRow(
        r"weights/num_(refused|ignored)_messages",
        "counter",
        "weights_messages_{}",
        "Messages of strangers.",
    ),
    MetricRow(
        r"reward/(?P<reward>.+)/num_failures",
        "gauge",
        "reward_failures",
        "Groups that a reward did not score, in the generators that report.",
    ),
    MetricRow(
        r"episode/(?P<environment>[^/]+)/(?P<metric>.+)",
        "gauge",
        "episode",
        "What environments measure, mean of the last step.",
    ),
    MetricRow(
        "validation/policy_version",
        "gauge",
        "validation_policy_version",
        "Version that was validated last.",
    ),
    MetricRow(
        r"validation/(?P<metric>.+)", "gauge", "validation", "Scores of the last validation."
    ),
    MetricRow("learner/step_s", "sum", "learner_step_seconds", "Time of the steps."),
    MetricRow(
        r"learner/(?P<phase>wait|wait_due|train|plan|score|forward|backward|update|snapshot|save)_s",
        "sum",
        "learner_phase_seconds",
        "Parts of the time of the steps; wait_due is part of wait, the passes are part of train.",
    ),
    MetricRow("learner/num_tokens", "sum", "learner_tokens", "Tokens trained, prompts included."),
    MetricRow(
        r"(learner|critic)/skipped_update", "sum", "{}_skipped_updates", "Not finite: skipped."
    ),
    MetricRow("learner/num_updates", "sum", "learner_updates", "Optimizer updates."),
    MetricRow(
        "learner/num_masked_updates", "sum", "learner_masked_updates", "Without a token to train."
    ),
    MetricRow(
        "learner/num_nonfinite_sequences",
        "sum",
        "learner_nonfinite_sequences",
        "Trajectories that left the batch: their log-probabilities were not finite.",
    ),
    MetricRow("learner/stalls", "counter", "learner_stalls", "Waits of run.stall_s or longer."),
    MetricRow(
        r"learner/activity/(?P<activity>\w+)",
        "gauge",
        "learner_activity",
        "1 for what the learner does.",
    ),
    MetricRow(
        "learner/num_unsaved_steps", "gauge", "learner_unsaved_steps", "Since the last checkpoint."
    ),
    MetricRow("learner/num_steps", "counter", "learner_steps", "Steps made by this process."),
    MetricRow(
        "time_s", "gauge", "learner_last_step_timestamp_seconds", "When the last step ended."
    ),
    MetricRow("self/num_tokens", "counter", "generator_tokens", "Tokens sampled by this process."),
    MetricRow(
        "self/pause_s", "counter", "generator_weight_pause_seconds", "Sampling stopped for weights."
    ),
    MetricRow(
        "self/busy_s", "counter", "generator_busy_seconds", "Time that all of its room was in use."
    ),
    MetricRow("self/uptime_s", "counter", "generator_uptime_seconds", "Time since its start."),
    MetricRow(
        r"self/reward/(?P<reward>.+)/num_failures",
        "counter",
        "generator_reward_failures",
        "Groups that a reward did not score.",
    ),
    MetricRow(
        "self/num_lost_agents",
        "counter",
        "generator_lost_agents",
        "Groups whose agent disappeared.",
    ),
    MetricRow(
        r"self/num_(active|waiting)", "gauge", "generator_{}_sequences", "Sequences in the engine."
    ),
    MetricRow(
        r"self/(.+)", "gauge", "generator_{}", "State of the generator, at its last heartbeat."
    ),
)
_PATTERNS = tuple((re.compile(row.pattern), row) for row in ROWS)
_UNITS = (
    ("_per_s", "_per_second"),
    ("_s", "_seconds"),
    ("_frac", "_ratio"),
    ("_fraction", "_ratio"),
)


@lru_cache(maxsize=2**14)
def family_of(metric: str) -> Family:
    """Of a metric of metrics.jsonl, or of `streamrl.tracking.prometheus.readings`."""
    for pattern, row in _PATTERNS:
        if found := pattern.fullmatch(metric):
            unnamed = set(range(1, pattern.groups + 1)) - set(pattern.groupindex.values())
            name = row.family.format(*(found.group(number) for number in sorted(unnamed)))
            labels = tuple(sorted(found.groupdict().items()))
            return Family(_name(name), row.kind, row.text, labels)
    known = find(metric)
    text = f"{metric} of metrics.jsonl, of the last step." if known is OWN else known.meaning
    return Family(_name(metric), "gauge", text)


def by_family(metrics: Mapping[str, float]) -> Iterator[tuple[Family, float]]:
    """Each metric with what it is to Prometheus."""
    for name, value in metrics.items():
        yield family_of(name), value


def _name(words: str) -> str:
    name = re.sub(r"[^a-zA-Z0-9_]", "_", words)
    for suffix, unit in _UNITS:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + unit
    return name
