"""Rows of the buffer, the generators, weight updates and validations."""

from streamrl.metrics.metric import Merge, Metric, Unit, Writer


def _of_buffer(name: str, unit: Unit, meaning: str) -> Metric:
    return Metric(name, unit, Merge.LAST, meaning, Writer.BUFFER)


def _of_learner(name: str, unit: Unit, merge: Merge, meaning: str) -> Metric:
    return Metric(name, unit, merge, meaning, Writer.LEARNER)


_BUFFER = (
    _of_buffer("buffer/granted", "leases", "Leases granted so far: the sum of the states below."),
    _of_buffer("buffer/leased", "groups", "Groups that generators sample."),
    _of_buffer("buffer/buffered", "groups", "Groups that wait to be trained."),
    _of_buffer("buffer/taken", "groups", "Groups that the learner trains."),
    _of_buffer("buffer/trained", "groups", "Groups trained and not yet in a checkpoint."),
    _of_buffer("buffer/acknowledged", "groups", "Groups that a checkpoint holds, so far."),
    _of_buffer("buffer/dropped_{reason}", "groups", "Groups dropped for this reason, so far."),
    _of_buffer("buffer/failed_groups_frac", "fraction", "Groups that failed, of all so far."),
    _of_buffer(
        "buffer/uniform_groups_frac",
        "fraction",
        "Groups dropped because their rewards are all alike, of all so far.",
    ),
    _of_buffer("buffer/books_balanced", "", "1 if every lease is in one of these counts."),
    _of_buffer("buffer/refused_{refusal}", "messages", "Messages refused for this reason, so far."),
    _of_buffer("buffer/num_bytes", "bytes", "Size of the groups that wait."),
    _of_buffer("buffer/capacity", "groups", "Most groups that admission lets in flight."),
    _of_buffer(
        "buffer/staleness_bound",
        "versions",
        "Bound under which groups are leased now: buffer.max_staleness, or what the learner has "
        "steered it to.",
    ),
    _of_buffer(
        "buffer/max_leases_per_prompt",
        "leases",
        "Leases of one open prompt that ended without a group: 3 or more, or 0.",
    ),
)

_STALENESS = (
    _of_learner(
        "buffer/staleness_mean",
        "versions",
        Merge.WHOLE,
        "Versions between sampling and training, of each group's furthest token, older or newer.",
    ),
    _of_learner(
        "buffer/staleness_max", "versions", Merge.MAX, "The largest staleness of a group trained."
    ),
    _of_learner(
        "buffer/staleness_min",
        "versions",
        Merge.MIN,
        "Staleness of the newest token; below 0 while a learner that went back trains groups of "
        "versions that it makes again.",
    ),
    _of_learner(
        "buffer/staleness_{staleness}/num_groups",
        "groups",
        Merge.SUM,
        "Groups of the step of this staleness.",
    ),
)


def _of_generators(name: str, unit: Unit, merge: Merge, meaning: str) -> Metric:
    return Metric(name, unit, merge, meaning, Writer.GENERATOR)


_GENERATOR = (
    _of_learner("generator/count", "generators", Merge.SUM, "Generators that report."),
    _of_generators(
        "generator/num_active", "sequences", Merge.SUM, "Sequences that the engines sample."
    ),
    _of_generators(
        "generator/num_waiting", "sequences", Merge.SUM, "Sequences that wait in the engines."
    ),
    _of_generators(
        "generator/max_num_groups", "groups", Merge.SUM, "Groups that generators have room for."
    ),
    _of_generators(
        "generator/num_lost_agents",
        "groups",
        Merge.SUM,
        "Groups whose agent disappeared, in the generators that report.",
    ),
    _of_learner(
        "generator/tokens_per_s",
        "tokens/s",
        Merge.WHOLE,
        "Tokens of the responses that reached the buffer during the step.",
    ),
    _of_learner(
        "generator/idle_frac",
        "fraction",
        Merge.WHOLE,
        "Share of the generators' room that is free.",
    ),
    _of_generators(
        "generator/{generator}/tokens_per_s",
        "tokens/s",
        Merge.LAST,
        "What this generator samples, over its last minute; not a number before its first token.",
    ),
    _of_generators(
        "generator/{generator}/policy_version",
        "versions",
        Merge.LAST,
        "Version of this generator, by its last heartbeat.",
    ),
    _of_generators(
        "generator/{generator}/heartbeat_age_s",
        "s",
        Merge.LAST,
        "Time since the last heartbeat of this generator.",
    ),
)

_FAIRNESS = (
    _of_learner(
        "fairness/{outcome}_length_mean",
        "tokens",
        Merge.WHOLE,
        "Length of the responses that were put, trained or dropped; 0 if there is none.",
    ),
    _of_learner(
        "fairness/{outcome}_length_p99",
        "tokens",
        Merge.WHOLE,
        "99th percentile of these lengths, rounded to 1/16.",
    ),
    _of_learner(
        "fairness/dropped_tokens_frac",
        "fraction",
        Merge.WHOLE,
        "Tokens dropped, of those trained or dropped.",
    ),
    _of_learner(
        "fairness/dropped_{reason}_tokens_frac",
        "fraction",
        Merge.WHOLE,
        "Tokens dropped for this reason, of those trained or dropped.",
    ),
    _of_learner(
        "fairness/discarded_tokens_frac",
        "fraction",
        Merge.WHOLE,
        "Tokens of siblings that `generator.oversample` leaves out, of those trained or dropped.",
    ),
    _of_learner(
        "fairness/length_distance",
        "",
        Merge.WHOLE,
        "Kolmogorov-Smirnov distance of sampled and trained lengths, 0 to 1.",
    ),
)

_WEIGHTS = (
    _of_learner(
        "weights/snapshot_s",
        "s",
        Merge.LAST,
        "The copy into the send buffer: all that the learner waits for.",
    ),
    _of_learner(
        "weights/ready_wait_s", "s", Merge.MAX, "Until the generators answer the announcement."
    ),
    _of_learner(
        "weights/transfer_s",
        "s",
        Merge.MAX,
        "Sending, or writing the file; next to nothing where memory is shared.",
    ),
    _of_learner("weights/receive_s", "s", Merge.MAX, "Receiving, beside the sampling."),
    _of_learner(
        "weights/load_s", "s", Merge.MAX, "From the last byte until the new weights sample."
    ),
    _of_learner("weights/pause_s", "s", Merge.MAX, "Part of load_s in which nothing is sampled."),
    _of_learner(
        "weights/num_receivers", "generators", Merge.SUM, "Generators on the weight channel."
    ),
    _of_learner(
        "weights/num_fenced", "generators", Merge.SUM, "Receivers that were left out, so far."
    ),
    _of_learner("weights/num_failed_loads", "updates", Merge.SUM, "Updates not loaded, so far."),
    _of_learner(
        "weights/store_s", "s", Merge.MAX, "From the snapshot to the manifest in weights.store."
    ),
    _of_learner(
        "weights/store_bytes", "bytes", Merge.LAST, "Of the last version in weights.store."
    ),
    _of_learner(
        "weights/num_store_failures",
        "versions",
        Merge.SUM,
        "Versions that weights.store did not take, so far; a later one is tried.",
    ),
    _of_learner(
        "weights/num_refused_messages",
        "messages",
        Merge.SUM,
        "Messages of strangers that were refused, so far.",
    ),
    _of_learner(
        "weights/num_ignored_messages",
        "messages",
        Merge.SUM,
        "Messages dropped unread after too many were refused, so far.",
    ),
)


def _of_validator(name: str, unit: Unit, meaning: str) -> Metric:
    return Metric(f"validation/{name}", unit, Merge.WHOLE, meaning, Writer.VALIDATOR)


def _scores(prefix: str, of_whom: str) -> tuple[Metric, ...]:
    return (
        _of_validator(f"{prefix}mean@{{k}}", "reward", f"Mean reward of k responses, {of_whom}."),
        _of_validator(
            f"{prefix}pass@{{k}}",
            "fraction",
            f"Chance that one of k responses has `pass_reward` or more, {of_whom}.",
        ),
        _of_validator(
            f"{prefix}majority@{{k}}",
            "reward",
            f"Mean reward of the commonest of k answers, {of_whom}.",
        ),
        _of_validator(f"{prefix}num_prompts", "prompts", f"How many prompts it is, {of_whom}."),
    )


_VALIDATION = (
    *_scores("", "over all prompts"),
    *_scores("{source}/", "over the prompts of this data source"),
    _of_validator("response_length_mean", "tokens", "Length of a response."),
    _of_validator("truncated_frac", "fraction", "Responses that a limit cut."),
    _of_validator("num_failed", "prompts", "Prompts that failed; they are in no mean."),
    _of_validator("num_too_long", "prompts", "Prompts that are too long; they are in no mean."),
    _of_validator("time_s", "s", "Time that the validation took."),
    _of_learner("validation/policy_version", "versions", Merge.LAST, "Version that was validated."),
    _of_learner(
        "validation/num_missed",
        "versions",
        Merge.LAST,
        "Versions that came due while another one was validated, so far.",
    ),
)

SYSTEM = (*_BUFFER, *_STALENESS, *_GENERATOR, *_FAIRNESS, *_WEIGHTS, *_VALIDATION)
