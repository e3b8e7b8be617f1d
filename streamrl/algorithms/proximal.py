"""The proximal policy: what ratios are taken to, and where the correction for stale data goes.

Decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298) splits current/behavior
into current/proximal, which is clipped, and proximal/behavior, which weighs. Three choices:

- recompute: the proximal policy is the learner's at the start of the step, by a forward pass;
- behavior: there is none; the loss's ratio is current/behavior, clipped as in plain PPO, and only
  losses without a ratio get importance weights;
- loglinear: no pass either; its log-probability is taken to lie between behavior and current, as
  far as the versions say (AReaL).
"""

import torch
from torch import Tensor

from streamrl.config.algorithm import AlgorithmSettings


def proximal_logprobs(
    mode: str, logprobs: Tensor, behavior_logprobs: Tensor, staleness: Tensor
) -> Tensor:
    """[R] log-probabilities under the proximal policy, for the modes that need no pass.

    With a token sampled s versions ago, the update under way is version s + 1 after it, so the
    proximal policy stands s / (s + 1) of the way from behavior to current.

    Args:
        logprobs: [R] under the current policy; no gradient flows back.
        staleness: [R] versions between sampling and training.

    Raises:
        ValueError: the mode is `recompute`, whose result only a forward pass can give.
    """
    if mode == "recompute":
        raise ValueError("mode: `recompute` takes a forward pass of the policy, not this function")
    behavior = behavior_logprobs.detach()
    if mode == "behavior":
        return behavior
    lag = staleness.abs().to(torch.promote_types(logprobs.dtype, torch.float32))
    return torch.lerp(behavior.to(lag.dtype), logprobs.detach().to(lag.dtype), lag / (lag + 1))


def weighed_logprobs(config: AlgorithmSettings, logprobs: Tensor, proximal: Tensor) -> Tensor:
    """[R] the train side of `rollout_is_weights`: the proximal policy, or the current one.

    Without a proximal policy of its own the current one is compared with the behavior policy;
    `config.ratio_holds_correction` then says whether the weights are for the metrics only.
    """
    return (logprobs if config.weighs_current_policy else proximal).detach()
