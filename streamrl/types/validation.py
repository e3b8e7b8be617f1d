"""What a validator reports to the learner: what it is doing, and the results of validations."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from streamrl.types.ranges import Count, Finite, PolicyVersion, Text

MAX_METRICS = 384
"""A report fits into one message of the weight protocol."""
MetricName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=96)]
Metrics: TypeAlias = Annotated[tuple[tuple[MetricName, Finite], ...], Meta(max_length=MAX_METRICS)]


class ValidationReport(Struct, frozen=True, kw_only=True):
    """The result of one validation: metrics, by their public names.

    `learner_id` identifies the learner process that made the version, since after a resume the same
    number may mean other weights; it is "" for version 0, the model folder's.
    """

    policy_version: PolicyVersion
    learner_id: Text
    metrics: Metrics


class ValidatorStatus(Struct, frozen=True, kw_only=True):
    """`next_version` is the oldest version of its learner that the validator wants next. While it
    `is_busy`, it wants none: it is validating one, with `num_done` of `num_prompts` finished. While
    it `is_resting`, so that validations cost little, it wants only the run's last version. `report`
    is of the previous validation.
    """

    next_version: Count = 0
    is_busy: bool = False
    is_resting: bool = False
    num_done: Count = 0
    num_prompts: Count = 0
    report: ValidationReport | None = None
