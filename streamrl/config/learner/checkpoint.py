"""`learner.checkpoint`: what is saved of a run, when, and what is kept."""

from typing import Literal

from pydantic import field_validator

from streamrl.config.numbers import NotNegative, Positive
from streamrl.config.section import Section


class CheckpointSettings(Section):
    """When the learner saves its state, what of it, and how many saved states it keeps."""

    every: Positive = 50
    """Steps between checkpoints; one is always made at the end."""
    keep: Positive = 2
    """Newest complete checkpoints kept; those in abandoned/ are not counted and not deleted."""
    keep_best: NotNegative = 0
    """Complete checkpoints kept besides them, those with the best mean of `best_by`."""
    best_by: str = "reward/mean"
    """Metric of `metrics.jsonl`, whose mean over the steps since the checkpoint before counts; or
    one of a validation, such as validation/mean@1, of the checkpoint's own version."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which mean of `best_by` is the best."""
    contents: tuple[Literal["model", "optimizer", "extra", "hf_model"], ...] = (
        "model",
        "optimizer",
        "extra",
        "hf_model",
    )
    """What is saved: parameters; AdamW's state; random generators, KL controller and running
    moments of rewards; and the policy as a Hugging Face folder, which `streamrl evaluate` needs."""
    load_contents: tuple[Literal["model", "optimizer", "extra"], ...] | None = None
    """What is loaded of the checkpoint that the run goes on from; null is all that `contents`
    names. Where `run.resume` names one, of that one alone: what the run saves later is loaded
    whole."""

    @property
    def is_best_validated(self) -> bool:
        """Whether `best_by` is what validations find."""
        return self.best_by.startswith("validation/")

    @property
    def loaded(self) -> tuple[str, ...]:
        """What `load_contents` means."""
        if self.load_contents is not None:
            return self.load_contents
        return tuple(content for content in self.contents if content != "hf_model")

    @field_validator("contents", "load_contents")
    @classmethod
    def _has_the_model(cls, contents: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if contents is not None and "model" not in contents:
            raise ValueError("must contain model, without which no run goes on from a checkpoint")
        return contents
