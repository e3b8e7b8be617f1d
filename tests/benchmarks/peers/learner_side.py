"""Advantages and loss of a batch against verl's own functions: same batch, same run.

    PYTHONPATH=. .venv/bin/python tests/benchmarks/peers/learner_side.py [--verl FOLDER] \
        [--rounds N]

GRPO advantages of 32 groups of 8 and the clipped loss with its gradient, token mean, float32, two
threads; responses of log-normal length (median 300, sigma 1, at most 4096). verl's functions are
`compute_grpo_vectorized_outcome_advantage` and `compute_policy_loss_vanilla`, on responses padded
to the longest, as its trainer has them. Fails unless both compute the same loss and gradient.
FOLDER is that of the package verl; without, its environment is made. bench_packing and
bench_rollout_is compare the partitioning and the importance weights.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.benchmarks.measure import contest, measured
from tests.benchmarks.peers.environments import environment, site_packages
from tests.benchmarks.peers.verl_functions import load

GROUPS, SIZE, THREADS, REPEATS = 32, 8, 2, 10
Work = Callable[[], tuple[Tensor, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("ours", "verl"))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    given = parser.parse_args()
    verl = given.verl or site_packages(environment("verl")) / "verl"
    if given.only:
        torch.set_num_threads(THREADS)
        work = ours() if given.only == "ours" else of_verl(verl)
        print(json.dumps(measured(work, given.repeats)))
        return
    gap = largest_gap(verl)
    if gap > 1e-4:
        raise SystemExit(f"the two compute different gradients: {gap:g} of the largest")
    figures = contest(
        __file__,
        ("ours", "verl"),
        *("--verl", str(verl)),
        threads=THREADS,
        repeats=REPEATS,
        rounds=given.rounds,
    )
    ratios = {
        "ratio": figures["verl"]["seconds"] / figures["ours"]["seconds"],
        "memory_ratio": figures["verl"]["extra_mib"] / max(figures["ours"]["extra_mib"], 1e-9),
    }
    known = {"benchmark": "learner_side", "gradient_gap": gap}
    print(json.dumps({**known, "system": "verl 0.6.0", **figures["verl"]}))
    print(json.dumps({**known, "system": "streamrl", **figures["ours"], **ratios}))


def largest_gap(verl: Path) -> float:
    """Between the gradients, of the largest; infinite if the losses differ."""
    (loss, gradient), (theirs, padded) = ours()(), of_verl(verl)()
    if not torch.isclose(loss, theirs, rtol=1e-4, atol=1e-6):
        return float("inf")
    mask = _mask(_batch()[3])
    return float((gradient - padded[mask]).abs().max() / gradient.abs().max())


def ours() -> Work:
    from streamrl.algorithms.advantages import AdvantageInput, estimate_advantages
    from streamrl.algorithms.losses.aggregation import LossInput
    from streamrl.algorithms.losses.policy import ppo
    from streamrl.algorithms.sequences import Sequences
    from streamrl.config.algorithm.advantages import GroupNormSettings
    from streamrl.config.algorithm.losses import PpoSettings

    new, old, rewards, lengths = _batch()
    mask, groups = _mask(lengths), torch.arange(GROUPS).repeat_interleave(SIZE)
    logprobs, proximal, sequences = new[mask], old[mask], Sequences.from_lengths(lengths)
    token_rewards = torch.zeros(sequences.num_tokens)
    token_rewards[lengths.cumsum(0) - 1] = rewards

    def work() -> tuple[Tensor, Tensor]:
        batch = AdvantageInput(token_rewards, groups, sequences)
        advantages = estimate_advantages("grpo", batch, GroupNormSettings())
        current = logprobs.detach().requires_grad_()
        loss = ppo(LossInput(current, proximal, advantages, None, sequences), PpoSettings()).loss
        loss.backward()
        return loss.detach(), current.grad

    return work


def of_verl(verl: Path) -> Work:
    functions = load(verl, "trainer/ppo/core_algos.py")
    new, old, rewards, lengths = _batch()
    mask = _mask(lengths)
    response_mask = mask.float()
    index = torch.arange(GROUPS).repeat_interleave(SIZE).numpy()
    token_rewards = torch.zeros_like(new)
    token_rewards[torch.arange(len(lengths)), lengths - 1] = rewards
    config = _Settings(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2)

    def work() -> tuple[Tensor, Tensor]:
        advantages, _ = functions.compute_grpo_vectorized_outcome_advantage(
            token_rewards, response_mask, index
        )
        current = new.detach().requires_grad_()
        loss, *_ = functions.compute_policy_loss_vanilla(
            old, current, advantages, response_mask, "token-mean", config
        )
        loss.backward()
        return loss.detach(), current.grad

    return work


class _Settings(SimpleNamespace):
    """verl's actor settings, of which the loss reads these."""

    def get(self, name: str, default: object) -> object:
        return getattr(self, name, default)


def _batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities [S, longest] of two policies a little apart, rewards and lengths [S]."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(GROUPS * SIZE, generator=generator)
    lengths = (300 * normal.exp()).long().clamp(1, 4096)
    shape = (len(lengths), int(lengths.max()))
    old = -2 * torch.rand(shape, generator=generator)
    new = old + 0.1 * torch.randn(shape, generator=generator)
    rewards = (torch.rand(len(lengths), generator=generator) < 0.5).float()
    return new, old, rewards, lengths


def _mask(lengths: Tensor) -> Tensor:
    return torch.arange(int(lengths.max())) < lengths[:, None]


if __name__ == "__main__":
    main()
