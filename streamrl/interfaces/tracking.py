"""A place where metrics go; see `streamrl.tracking`."""

from collections.abc import Mapping, Sequence
from typing import Any


class Tracker:
    """Called by the learner, always from one thread beside its own; an error of one tracker does
    not reach the others. One that derives from it leaves out what it does not show."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Once a step."""

    def log_validation(self, metrics: Mapping[str, Any], policy_version: int) -> None:
        """Of the validation of a version; it may come long after that version's step."""

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Some of what a step has trained on, as lines of `samples.jsonl`."""

    def log_validation_samples(
        self, samples: Sequence[Mapping[str, Any]], policy_version: int
    ) -> None:
        """What the validated versions wrote for the same held-out prompts, as lines of
        `validation/VERSION.jsonl`: those of one prompt together, oldest version first."""

    def close(self) -> None:
        """What it holds is given back."""
