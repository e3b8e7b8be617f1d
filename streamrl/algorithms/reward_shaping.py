"""From trajectory rewards to token rewards: shaping, normalization, weights and resampling.

The order is that of ROLL (github.com/alibaba/ROLL): format penalty (here also a penalty for
truncated trajectories), normalize, clip, length reward, KL per token, whiten; the advantage
estimator then whitens and clips again.

Invariant: each call takes the whole batch and returns new tensors. Scores are [S], one per
trajectory.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from streamrl.algorithms.moments import Moments, whiten
from streamrl.algorithms.sequences import Groups, Sequences
from streamrl.config.algorithm.rewards import (
    LengthRewardSettings,
    NormScope,
    PfPpoSettings,
    RewardShapingSettings,
    SampleWeightSettings,
)

_STD_FLOOR = 1e-6
_MOMENTS = ("count", "mean", "squares")


class RunningMoments:
    """Mean and standard deviation of all rewards so far; saved in checkpoints."""

    def __init__(self) -> None:
        self._moments = Moments.of(torch.zeros(0))

    def update(self, rewards: Tensor) -> None:
        self._moments = self._moments.merge(Moments.of(rewards.detach().cpu()))

    @property
    def mean(self) -> float:
        return float(self._moments.mean)

    @property
    def std(self) -> float:
        return float(self._moments.variance(ddof=1).sqrt())

    def state_dict(self) -> dict[str, float]:
        return dict(zip(_MOMENTS, self._moments.to_tensor().tolist(), strict=True))

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        tensor = torch.tensor([state[name] for name in _MOMENTS], dtype=torch.float64)
        self._moments = Moments.from_tensor(tensor)


_BASELINE = "baseline/"


class RoleBaselines:
    """The running mean reward of each role, starting at 0, for the advantage rae; saved in
    checkpoints."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.values: dict[str, float] = {}

    def follow(self, roles: Sequence[str], rewards: Tensor) -> Tensor:
        """[E] for each episode in turn the baseline of its role before it; `rewards` are [E]."""
        before = []
        for role, reward in zip(roles, rewards.tolist(), strict=True):
            before.append(self.values.get(role, 0.0))
            self.values[role] = self._decay * before[-1] + (1 - self._decay) * reward
        return torch.tensor(before, dtype=torch.float64)

    def state_dict(self) -> dict[str, float]:
        return {_BASELINE + role: value for role, value in self.values.items()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        known = {name: value for name, value in state.items() if name.startswith(_BASELINE)}
        self.values = {name.removeprefix(_BASELINE): value for name, value in known.items()}


def shape_rewards(
    rewards: Tensor,
    groups: Tensor,
    sequences: Sequences,
    config: RewardShapingSettings,
    running: RunningMoments,
    num_invalid_turns: Tensor,
    is_truncated: Tensor,
) -> tuple[Tensor, dict[str, float]]:
    """[S] the shaped rewards, and metrics.

    Args:
        rewards: [S] from the environment.
        groups: [S] int64, equal for siblings; with `agentic`, for episodes that it compares.
        running: state of the scope `running`; first updated with this batch.
        num_invalid_turns: [S], for `format_penalty`.
        is_truncated: [S] bool, for `truncated_penalty`.
    """
    shaped = rewards.double() - config.format_penalty * num_invalid_turns
    if config.truncated_penalty is not None:
        shaped = shaped - config.truncated_penalty * is_truncated
    if config.agentic is not None:
        shaped = normalize_agentic(shaped, groups, config.agentic.method)
    else:
        shaped = normalize(shaped, groups, config.norm_mean, config.norm_std, running)
    metrics: dict[str, float] = {}
    if config.clip is not None:
        beyond = shaped.abs() > config.clip
        metrics = {"reward/clipped_frac": float(beyond.double().mean())}
        shaped = shaped.clamp(-config.clip, config.clip)
    if config.length is not None:
        penalty = overlong_penalty(sequences.lengths.to(rewards.device), config.length)
        metrics = metrics | {"reward/overlong_penalty": float(penalty.mean())}
        shaped = shaped - penalty
    return shaped.to(rewards.dtype), metrics


def normalize(
    rewards: Tensor,
    groups: Tensor,
    mean_over: NormScope | None,
    std_over: NormScope | None,
    running: RunningMoments,
) -> Tensor:
    """(x - mean) / (std + 1e-6), each over its own scope; None skips that step, and rewards
    without spread are not divided."""
    if "running" in (mean_over, std_over):
        running.update(rewards)
    mean = _over(mean_over, rewards, groups, running)[0]
    std = _over(std_over, rewards, groups, running)[1]
    scale = std + _STD_FLOOR if std_over else std
    return ((rewards - mean) / torch.where(std > _STD_FLOOR, scale, 1.0)).to(rewards.dtype)


def normalize_agentic(scores: Tensor, groups: Tensor, method: str) -> Tensor:
    """Normalize episode scores within their groups; 0 for a group of one or without spread.

    Args:
        groups: [S] int64, equal for one start state, for one environment tag, or for all.
        method: identity | mean | mean_std | asym_clip.
    """
    if method == "identity":
        return scores
    grouped = Groups.of(groups)
    centered = scores - grouped.mean(scores)
    if method == "mean":
        return centered
    std = grouped.std(scores)
    standard = torch.where(std > _STD_FLOOR, centered / (std + _STD_FLOOR), 0.0)
    return standard.clamp(-1.0, 3.0) if method == "asym_clip" else standard


def overlong_penalty(lengths: Tensor, config: LengthRewardSettings) -> Tensor:
    """[S] the penalty: 0 up to `buffer` tokens before `max_length`, then rising linearly to its
    full value there (DAPO)."""
    excess = lengths.double() - (config.max_length - config.buffer)
    return config.penalty * (excess / config.buffer).clamp(0.0, 1.0)


def token_rewards(
    rewards: Tensor,
    sequences: Sequences,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    whitened: bool = False,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """[R] each trajectory's reward at its last token, minus `kl_coef` times `kl` [R].

    The parts of the reward in `turn_rewards` [R] stay at their tokens, and the last token gets the
    rest. The result is then float64: in float32, siblings with equal rewards could have different
    sums.
    """
    if turn_rewards is not None:
        turn_rewards = turn_rewards.double()
        rewards = rewards.double() - sequences.sum(turn_rewards)
    lengths = sequences.lengths.to(rewards.device)
    last = (lengths.cumsum(0) - 1)[lengths > 0]
    placed = rewards.new_zeros(sequences.num_tokens).index_copy_(0, last, rewards[lengths > 0])
    if turn_rewards is not None:
        placed = placed + turn_rewards
    if kl is not None:
        placed = placed - kl_coef * kl
    return whiten(placed) if whitened else placed


def difficulty_mask(
    scores: Tensor, groups: Tensor, low: float | None, high: float | None
) -> Tensor:
    """[S] bool: low < the group's mean score < high; groups of one always pass."""
    grouped = Groups.of(groups)
    mean = grouped.mean(scores)
    above = torch.ones_like(grouped.alone) if low is None else mean > low
    below = torch.ones_like(grouped.alone) if high is None else mean < high
    return grouped.alone | (above & below)


def sample_weights(lengths: Tensor, config: SampleWeightSettings, difficulty: Tensor) -> Tensor:
    """[S] weights with mean 1: 0.5 + 1.5 difficulty, times a factor from 1.5 for the shortest to
    0.5 for the longest response.

    Args:
        lengths: [S] response tokens.
        difficulty: [S] in [0, 1], from the prompts.
    """
    weights = torch.ones(len(lengths), dtype=torch.float64, device=lengths.device)
    if config.difficulty:
        weights = weights * (0.5 + 1.5 * difficulty.clamp(0.0, 1.0))
    if config.length and len(lengths):
        longer = (lengths - lengths.min()) / (lengths.max() - lengths.min() + 1e-8)
        weights = weights * (1.5 - longer)
    return weights / weights.mean()


def pf_ppo_chances(scores: Tensor, config: PfPpoSettings) -> Tensor:
    """[S] relative probabilities of being drawn (PF-PPO, arXiv 2409.06957)."""
    match config.method:
        case "pow":
            chances = scores.abs() ** config.weight_pow
        case "max_min":
            chances = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
        case _:
            chances = torch.where(scores == scores.max(), 0.4, 0.1)
    return chances + 1e-8


def pf_ppo_resample(scores: Tensor, config: PfPpoSettings) -> Tensor:
    """[S] int64 indices of the trajectories of the resampled batch, drawn with replacement."""
    return torch.multinomial(pf_ppo_chances(scores, config), len(scores), replacement=True)


def _over(
    scope: NormScope | None, rewards: Tensor, groups: Tensor, running: RunningMoments
) -> tuple[Tensor, Tensor]:
    """[S] mean and standard deviation (ddof 1) over the scope."""
    match scope:
        case "running":
            mean, std = rewards.new_tensor(running.mean), rewards.new_tensor(running.std)
        case "group":
            grouped = Groups.of(groups)
            return grouped.mean(rewards), grouped.std(rewards)
        case "batch":
            moments = Moments.of(rewards)
            mean, std = moments.mean, moments.variance(ddof=1).sqrt()
        case _:
            mean, std = rewards.new_zeros(()), rewards.new_ones(())
    return mean.expand(len(rewards)), std.expand(len(rewards))
