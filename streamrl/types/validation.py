"""What a validator tells the learner: what it does, and what a validation has found."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from streamrl.types.ranges import Count, Finite, PolicyVersion, Text

MAX_METRICS = 384
"""A report fits into one message of the weight protocol."""
MetricName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=96)]
Metrics: TypeAlias = Annotated[tuple[tuple[MetricName, Finite], ...], Meta(max_length=MAX_METRICS)]


class ValidationReport(Struct, frozen=True, kw_only=True):
    """Of one validation: metrics, by their public names.

    `learner_id` identifies the learner process that made the version, since after a resume the same
    number may be that of other weights; it is "" for version 0, the model folder's.
    """

    policy_version: PolicyVersion
    learner_id: Text
    metrics: Metrics


class ValidatorStatus(Struct, frozen=True, kw_only=True):
    """`next_version` is the oldest version of its learner that the validator is to be sent. While
    it `is_busy` it is to be sent none: it validates one, of which `num_done` of `num_prompts` are
    finished; while it `is_resting`, so that validations cost little, only the last of the run.
    `report` is of the validation before.
    """

    next_version: Count = 0
    is_busy: bool = False
    is_resting: bool = False
    num_done: Count = 0
    num_prompts: Count = 0
    report: ValidationReport | None = None
