"""`algorithm.reward`, `sample_weight` and `pf_ppo`: from the rewards of trajectories to those of
tokens.

The fixed order is described in `streamrl.algorithms.reward_shaping`.
"""

from collections.abc import Iterator
from typing import Literal

from streamrl.config.section import NotNegativeNumber, Positive, PositiveNumber, Section

NormScope = Literal["batch", "group", "running"]


class AgenticNormalizationSettings(Section):
    """Normalization of episode scores, in place of norm_mean and norm_std."""

    grouping: Literal["state", "batch", "inductive"] = "state"
    """Episodes that are compared: those with the same start state, all, or those of one
    environment."""
    method: Literal["identity", "mean", "mean_std", "asym_clip"] = "mean_std"
    """Method; asym_clip is mean_std clamped to [-1, 3]."""


class LengthRewardSettings(Section):
    """Soft penalty for overlong responses (DAPO, eq. 13)."""

    max_length: Positive
    """Response tokens at which the penalty is full."""
    buffer: Positive
    """Tokens before `max_length` over which the penalty grows from 0."""
    penalty: PositiveNumber = 1.0
    """The full penalty, subtracted from the reward."""

    def contradictions(self) -> Iterator[str]:
        if self.buffer > self.max_length:
            yield f"""buffer: is {self.buffer}; it must be at most max_length, which is
                {self.max_length}"""


class RewardShapingSettings(Section):
    """Reward shaping, in the order of the fields."""

    format_penalty: NotNegativeNumber = 0.0
    """Penalty per turn that the environment could not parse."""
    truncated: Literal["train", "mask", "penalize"] = "train"
    """Truncated trajectories: train them, mask them in the loss, or penalize them."""
    truncated_penalty: PositiveNumber | None = None
    """Penalty of `truncated: penalize`."""
    agentic: AgenticNormalizationSettings | None = None
    """Normalization for agentic tasks; null: norm_mean and norm_std."""
    norm_mean: NormScope | None = None
    """Scope of the mean that is subtracted; null: none."""
    norm_std: NormScope | None = None
    """Scope of the standard deviation that divides; null: none."""
    clip: PositiveNumber | None = None
    """Bound on the magnitude."""
    length: LengthRewardSettings | None = None
    """Null: none."""
    placement: Literal["episode", "turn"] = "episode"
    """Where rewards are placed: at the episode's last token, or at the end of their turn."""
    whiten: bool = False
    """Standardize token rewards over the batch."""
    difficulty_low: float | None = None
    """Groups whose mean reward is at or below this are not trained."""
    difficulty_high: float | None = None
    """Groups whose mean reward is at or above this are not trained."""

    def contradictions(self) -> Iterator[str]:
        if self.agentic and (self.norm_mean or self.norm_std):
            yield "agentic: excludes norm_mean and norm_std; set one or the other"
        if (self.truncated == "penalize") != (self.truncated_penalty is not None):
            yield f"""truncated: is {self.truncated} and truncated_penalty is
                {self.truncated_penalty}; set truncated: penalize and truncated_penalty together"""
        low, high = self.difficulty_low, self.difficulty_high
        if low is not None and high is not None and low >= high:
            yield f"difficulty_low: is {low:g}; it must be below difficulty_high, which is {high:g}"


class SampleWeightSettings(Section):
    """Weights of trajectories in the loss, scaled to a mean of 1."""

    difficulty: bool = False
    """Harder prompts weigh more: 0.5 + 1.5 difficulty."""
    length: bool = False
    """Longer responses weigh less: 1.5 for the shortest to 0.5 for the longest."""


class PfPpoSettings(Section):
    """Resampling of trajectories by reward (PF-PPO, arXiv 2409.06957)."""

    method: Literal["pow", "max_min", "max_random"] = "pow"
    """Relative probability of a trajectory. pow: |reward|^weight_pow; max_min: only the best and
    the worst; max_random: 0.4 for the best, 0.1 for the others."""
    weight_pow: NotNegativeNumber = 2.0
    """Exponent of the method pow."""
