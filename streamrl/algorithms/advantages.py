"""Advantage estimators, by name: from token rewards to credit per token.

Below, s is the summed reward of a trajectory, and a group is the trajectories of one prompt
(siblings). Each estimator takes a whole batch and returns [R] without gradient. Formulas are those
of verl (github.com/volcengine/verl, core_algos.py); each function names its paper. Standard
deviations are those of a sample (ddof 1). All is computed in float64.

Invariant: flat tokens have no gaps between turns, so value, advantage and return carry over from
one turn of a trajectory to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.moments import whiten
from streamrl.algorithms.sequences import Groups, Sequences, require_rows
from streamrl.config.algorithm import advantages as settings
from streamrl.config.algorithm.advantages import AdvantageSettings
from streamrl.errors import ConfigError
from streamrl.user_code import named


@dataclass(frozen=True, eq=False)
class AdvantageInput:
    """One batch of trajectories."""

    token_rewards: Tensor
    """[R] reward of each response token; an outcome reward is at the last one."""
    groups: Tensor
    """[S] int64, equal for siblings."""
    sequences: Sequences
    values: Tensor | None = None
    """[R] the critic's values; gae needs them."""
    baseline: Tensor | None = None
    """[S] for remax the reward of the greedy rollout of the same prompt, for rae the running
    baseline of the role."""
    logprobs: Tensor | None = None
    """[R] nats, under the policy at the start of the batch; opob and otb need them."""
    behavior_logprobs: Tensor | None = None
    """[R] nats, under the distribution that was sampled from; opob and otb need them."""
    squared_probabilities: Tensor | None = None
    """[R] sum of p^2 over the vocabulary, under the same policy as `logprobs`; otb uses it."""
    components: Tensor | None = None
    """[S, K] the rewards named in `GdpoSettings.rewards`, in that order; gdpo needs them."""
    anchors: Tensor | None = None
    """[R] int64, nonzero at the last token of each turn, and equal for turns that answer the same
    observed tokens; 0 elsewhere. gigpo needs them."""

    def __post_init__(self) -> None:
        require_rows(
            self.sequences.num_tokens,
            token_rewards=self.token_rewards,
            values=self.values,
            logprobs=self.logprobs,
            behavior_logprobs=self.behavior_logprobs,
            squared_probabilities=self.squared_probabilities,
            anchors=self.anchors,
        )
        require_rows(len(self.sequences), groups=self.groups, baseline=self.baseline)

    @property
    def returns(self) -> Tensor:
        """[S] the summed reward s of each trajectory."""
        return self.sequences.sum(self.token_rewards.double())

    def to_tokens(self, per_sequence: Tensor) -> Tensor:
        return self.sequences.expand(per_sequence).to(self.token_rewards.dtype)

    def whiten(self, values: Tensor) -> Tensor:
        """[R] shifted and scaled to mean 0 and variance 1 over the batch."""
        return whiten(values)


_SMALLEST_NORM = 1e-12
"""Lower bound of squared gradient norms, so that a group whose tokens all have probability 1 still
has a weighted mean."""

Advantage = Callable[[AdvantageInput, Any], Tensor]
"""(batch, settings) -> [R]; the settings are an instance of `ADVANTAGE_SETTINGS[name]`, or of
`UserAdvantageSettings` for a user's own estimator."""


def gae(batch: AdvantageInput, config: settings.GaeSettings) -> Tensor:
    """Generalized advantage estimation (arXiv 1506.02438), whitened."""
    return _whitened(_gae(batch, config), batch, config)


def gae_returns(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """[R] the critic's training targets: the advantage before whitening plus the value."""
    assert isinstance(config, settings.GaeSettings), "only gae has a critic"
    returns = _gae(batch, config) + _required(batch.values, "values", "gae")
    return returns.to(batch.token_rewards.dtype)


def reinforce(batch: AdvantageInput, config: settings.DiscountSettings) -> Tensor:
    """The discounted return."""
    total = discounted_sum(batch.token_rewards.double(), batch.sequences, config.gamma)
    return total.to(batch.token_rewards.dtype)


def reinforce_plus_plus(batch: AdvantageInput, config: settings.DiscountSettings) -> Tensor:
    """The discounted return, whitened (REINFORCE++, arXiv 2501.03262)."""
    total = discounted_sum(batch.token_rewards.double(), batch.sequences, config.gamma)
    return _whitened(total, batch, config)


def reinforce_plus_plus_baseline(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """s minus the group mean, whitened over tokens (arXiv 2501.03262)."""
    centered = batch.sequences.expand(_centered(batch.returns, Groups.of(batch.groups)))
    return _whitened(centered, batch, config)


def _whitened(values: Tensor, batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """[R] for estimators that whiten by definition: whitened, unless the settings turn it off."""
    whitened = values if config.whiten is False else batch.whiten(values)
    return whitened.to(batch.token_rewards.dtype)


def grpo(batch: AdvantageInput, config: settings.GroupNormSettings) -> Tensor:
    """(s - mean) / (std + 1e-6) over the group (arXiv 2402.03300); a group of one keeps s."""
    return batch.to_tokens(_relative(batch.returns, Groups.of(batch.groups), config))


def dr_grpo(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """s - mean (Dr. GRPO, arXiv 2503.20783)."""
    return batch.to_tokens(_centered(batch.returns, Groups.of(batch.groups)))


def grpo_passk(batch: AdvantageInput, config: settings.GroupNormSettings) -> Tensor:
    """Only the best trajectory of a group gets credit: its lead over the second (arXiv 2503.19595).

    Raises:
        ValueError: a group has a single trajectory.
    """
    groups = Groups.of(batch.groups)
    if len(groups) and int(groups.sizes.min()) < 2:
        alone = groups.ids[groups.sizes < 2][0]
        raise ValueError(f"groups: grpo_passk needs at least 2 per group; group {alone} has 1")
    scores = batch.returns
    lead, best = groups.lead(scores)
    if config.norm_adv_by_std:
        lead = lead / (groups.std(scores)[best] + 1e-6)
    return batch.to_tokens(torch.zeros_like(scores).index_copy_(0, best, lead))


def rloo(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """s minus the mean of the other siblings (RLOO, arXiv 2402.14740); a group of one keeps s."""
    groups = Groups.of(batch.groups)
    sizes = groups.sizes[groups.index]
    return batch.to_tokens(_centered(batch.returns, groups) * sizes / (sizes - 1).clamp(min=1))


def remax(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """Reward to go minus the greedy rollout's reward (ReMax, arXiv 2310.10505)."""
    to_go = discounted_sum(batch.token_rewards.double(), batch.sequences, 1.0)
    baseline = batch.sequences.expand(_required(batch.baseline, "baseline", "remax"))
    return (to_go - baseline).to(batch.token_rewards.dtype)


def opo(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """s minus the length-weighted group mean (OPO, arXiv 2505.23585); a group of one keeps s."""
    lengths = batch.sequences.lengths.to(batch.token_rewards.device).double()
    return batch.to_tokens(_centered(batch.returns, Groups.of(batch.groups), weights=lengths))


def opob(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """s minus the baseline of least variance for off-policy data, sum(w^2 g^2 s) / sum(w^2 g^2)
    over the group (OPOB of VCPO, arXiv 2602.17616); a group of one keeps s.

    w is the unbounded ratio of the whole trajectory, g^2 the squared norm of the gradient of its
    log-probability. The paper measures g with a backward pass per trajectory; here it is the
    gradient with respect to the logits, taken from log-probabilities alone: the sum over tokens of
    (1 - p)^2, the sampled token's entry. The full squared norm is at most twice that. With w = 1
    this is the optimal on-policy baseline; OPO approximates its g^2 by the length.
    """
    groups, sequences = Groups.of(batch.groups), batch.sequences
    logprobs = _required(batch.logprobs, "logprobs", "opob").double()
    behavior = _required(batch.behavior_logprobs, "behavior_logprobs", "opob").double()
    log_ratio = sequences.sum(logprobs - behavior)
    norm = sequences.sum(logprobs.expm1().square()) + _SMALLEST_NORM
    baseline = groups.mean_by_log_weights(batch.returns, 2 * log_ratio + norm.log())
    return batch.to_tokens(torch.where(groups.alone, batch.returns, batch.returns - baseline))


_LARGEST_TOKEN_RATIO = 2.0
"""verl's default bound on the ratios that scale the energies."""


def otb(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """Reward to go G_t minus the optimal baseline of its position t, sum(W_t G_t) / sum(W_t) over
    the siblings that have a token at t (OTB, arXiv 2602.07078; positions as in verl's
    compute_optimal_token_baseline_advantage). If only one sibling has a token at t, it keeps G_t.

    W_t is the energy of the response up to t: the sum over j <= t of the squared norm of the
    gradient of log p_j with respect to the logits, 1 - 2 p + sum over the vocabulary of p^2, times
    the squared ratio to the behavior policy (the ratio bounded by 2). Without
    `squared_probabilities`, as in a run, (1 - p)^2 stands for that norm, as in opob; it is between
    half of the norm and all of it. The paper proves optimality for on-policy data.
    """
    sequences, groups = batch.sequences, Groups.of(batch.groups)
    logprobs = _required(batch.logprobs, "logprobs", "otb").double()
    behavior = _required(batch.behavior_logprobs, "behavior_logprobs", "otb").double()
    ratios = (logprobs - behavior).exp().clamp(max=_LARGEST_TOKEN_RATIO)
    lengths = sequences.lengths.to(logprobs.device)
    starts = sequences.expand(lengths.cumsum(0) - lengths)
    energies = logprobs.expm1().square()
    if batch.squared_probabilities is not None:
        energies = 1 - 2 * logprobs.exp() + batch.squared_probabilities
    energies = energies * ratios.square() + _SMALLEST_NORM
    # The sum from a response's end, of the responses in reverse: not a difference of two sums.
    backward = Sequences.from_lengths(sequences.lengths.flip(0))
    weights = discounted_sum(energies.flip(0), backward, 1.0).flip(0)
    places = torch.arange(len(logprobs), device=logprobs.device) - starts
    at_place = Groups.of(sequences.expand(groups.index) * max(sequences.longest, 1) + places)
    to_go = discounted_sum(batch.token_rewards.double(), sequences, 1.0)
    baseline = at_place.mean(to_go, weights)
    advantages = torch.where(at_place.alone, to_go, to_go - baseline)
    return advantages.to(batch.token_rewards.dtype)


def maxrl(batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """(s - mean) / mean over the group, 0 if the mean is not positive (MaxRL, arXiv 2602.02710).

    This is the gradient of the log of the success probability, to the order that the group size
    allows, so harder prompts weigh more. It is meant for rewards of 0 and 1; with other positive
    rewards it is the gradient of the log of the expected reward. Negative rewards can bring the
    mean near 0, so the result is bounded to the range that it has without them: from -1 to the
    number of siblings minus 1. A group of one has no advantage.
    """
    groups, scores = Groups.of(batch.groups), batch.returns
    mean = groups.mean(scores)
    relative = (scores - mean) / torch.where(mean > 0, mean, 1.0)
    relative = relative.clamp(min=-1.0).minimum(groups.sizes[groups.index] - 1.0)
    return batch.to_tokens(torch.where(mean > 0, relative, 0.0))


def gdpo(batch: AdvantageInput, config: settings.GdpoSettings) -> Tensor:
    """The weighted sum over rewards k of (s_k - mean) / (std + 1e-6), each over the group, then
    whitened over the batch's tokens (GDPO, arXiv 2601.05242; verl).

    A reward that is equal for all siblings adds nothing, however large; one with little spread
    counts as much as one with a lot. A group of one keeps its rewards. `token_rewards`, and
    therefore reward shaping, are not used.
    """
    components = _required(batch.components, "components", "gdpo").double()
    groups = Groups.of(batch.groups)
    total = torch.zeros_like(components[:, 0])
    for weight, scores in zip(config.rewards.values(), components.unbind(1), strict=True):
        total = total + weight * _relative(scores, groups, config)
    return _whitened(batch.sequences.expand(total), batch, config)


def gigpo(batch: AdvantageInput, config: settings.GigpoSettings) -> Tensor:
    """The grpo advantage of the episode plus `step_weight` times that of the turn: a turn's return,
    discounted by `turn_gamma` per turn, relative to the group's turns that answered the same
    observation (GiGPO, arXiv 2505.10978).

    With `algorithm.reward.placement: turn` each turn's reward is discounted back from its turn,
    otherwise the episode's reward from the end. Observations are equal if their tokens are equal;
    those of an episode with images equal no other. A turn whose observation nobody else answered
    has the episode's advantage alone.
    """
    anchors = _required(batch.anchors, "anchors", "gigpo")
    rewards, groups = batch.token_rewards.double(), Groups.of(batch.groups)
    is_end = anchors != 0
    turns = Sequences.from_lengths(batch.sequences.sum(is_end.double()).long())
    of_turn = is_end.cumsum(0) - is_end.long()
    places = torch.arange(len(batch.sequences), device=anchors.device)
    owners = places.repeat_interleave(turns.lengths)
    earned = rewards.new_zeros(turns.num_tokens).index_add_(0, of_turn, rewards)
    returns = discounted_sum(earned, turns, config.turn_gamma)
    answered = torch.stack([groups.index[owners], anchors[is_end]], 1)
    met = Groups.of(torch.unique(answered, dim=0, return_inverse=True)[1])
    steps = torch.where(met.alone, 0.0, _relative(returns, met, config))
    episodes = batch.sequences.expand(_relative(batch.returns, groups, config))
    return (episodes + config.step_weight * steps[of_turn]).to(batch.token_rewards.dtype)


def rae(batch: AdvantageInput, config: settings.RaeSettings) -> Tensor:
    """s minus the running baseline b of the episode's game and role (RAE, arXiv 2506.24119).

    Starting from b = 0, each episode in batch order updates b <- decay b + (1 - decay) s. The
    advantage is s minus the b before the update, as in the authors' code; the paper's, with the b
    after it, is `decay` times this one. For the first 1 / (1 - decay) episodes of a role the
    baseline is too close to 0.
    """
    return batch.to_tokens(batch.returns - _required(batch.baseline, "baseline", "rae"))


def gpg(batch: AdvantageInput, config: settings.GpgAdvantageSettings) -> Tensor:
    """(S / nonzero)(s - mean) / f_norm (GPG, arXiv 2504.02546); nonzero counts nonzero rewards."""
    scores = batch.returns
    scale = len(scores) / scores.count_nonzero().clamp(min=1) / config.f_norm
    return batch.to_tokens(scale * _centered(scores, Groups.of(batch.groups)))


ADVANTAGES: dict[str, Advantage] = {
    estimator.__name__: estimator
    for estimator in (
        *(gae, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, grpo, dr_grpo),
        *(grpo_passk, rloo, remax, opo, opob, otb, maxrl, gdpo, gigpo, rae, gpg),
    )
}


def advantage_estimator(name: str) -> Advantage:
    """Return the estimator named by `algorithm.advantage`; raises as `streamrl.user_code.named`."""
    return named("algorithm.advantage", name, ADVANTAGES)


def estimate_advantages(name: str, batch: AdvantageInput, config: AdvantageSettings) -> Tensor:
    """[R] from the named estimator, whitened and clipped as the settings say.

    Raises:
        ConfigError: a user's own estimator did not return one number per token.
    """
    with torch.no_grad():
        advantages = advantage_estimator(name)(batch, config)
        if not isinstance(advantages, Tensor) or advantages.shape != batch.token_rewards.shape:
            shape = tuple(getattr(advantages, "shape", ()))
            raise ConfigError(
                f"algorithm.advantage: {name} returned {type(advantages).__name__} of shape "
                f"{shape}; it must return a tensor of shape ({len(batch.token_rewards)},)"
            )
        if config.whiten:
            advantages = batch.whiten(advantages)
        return advantages if config.clip is None else advantages.clamp(-config.clip, config.clip)


def discounted_sum(values: Tensor, sequences: Sequences, discount: float) -> Tensor:
    """[R] sum over k of discount^k values[t + k], within the sequence of t.

    A window of length 2w is two windows of length w, so log2(longest) passes over R suffice.
    """
    lengths = sequences.lengths.to(values.device)
    ends = sequences.expand(lengths.cumsum(0))
    left = ends - torch.arange(len(values), device=values.device)
    total, width = values, 1
    while width < sequences.longest:
        ahead = torch.zeros_like(total)
        ahead[:-width] = total[width:]
        total = total + discount**width * torch.where(left > width, ahead, 0.0)
        width *= 2
    return total


def _relative(scores: Tensor, groups: Groups, config: settings.GroupNormSettings) -> Tensor:
    """[S] (score - group mean) / (group std + 1e-6); without siblings the score itself."""
    centered = _centered(scores, groups)
    if not config.norm_adv_by_std:
        return centered
    std = torch.where(groups.alone, 1.0, groups.std(scores))
    return centered / (std + 1e-6)


def _centered(scores: Tensor, groups: Groups, weights: Tensor | None = None) -> Tensor:
    """[S] score minus group mean; without siblings the score itself, as in verl."""
    return torch.where(groups.alone, scores, scores - groups.mean(scores, weights))


def _gae(batch: AdvantageInput, config: settings.GaeSettings) -> Tensor:
    """[R] float64, before whitening."""
    values = _required(batch.values, "values", "gae").double()
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    lengths = batch.sequences.lengths.to(values.device)
    following[(lengths.cumsum(0) - 1)[lengths > 0]] = 0.0
    errors = batch.token_rewards.double() + config.gamma * following - values
    return discounted_sum(errors, batch.sequences, config.gamma * config.lam)


def _required(tensor: Tensor | None, name: str, estimator: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"{name}: advantage {estimator} needs it")
    return tensor.detach()
