"""The sets of token ids beside recorded tokens, as tensors of a micro-batch.

Shapes: R response tokens of the trajectories, M candidates of all of them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from streamrl.algorithms.candidates import Candidates
from streamrl.types import TokenSets, TopLogprobs, Trajectory


def sampling_mask(trajectories: Sequence[Trajectory]) -> Candidates | None:
    """What each response token was sampled among; None if that was recorded of none."""
    lengths = [t.num_tokens for t in trajectories]
    sets = TokenSets.joined([t.sampling_mask for t in trajectories], lengths)
    return None if sets is None else _candidates(sets, trajectories)


def top_candidates(trajectories: Sequence[Trajectory], targets: torch.Tensor) -> Candidates | None:
    """The likeliest candidates but the response token itself [R]; None if they were recorded of
    none."""
    lengths = [t.num_tokens for t in trajectories]
    sets = TopLogprobs.joined([t.top_logprobs for t in trajectories], lengths)
    if sets is None:
        return None
    logprobs = torch.from_numpy(sets.logprobs)
    return _candidates(sets, trajectories, logprobs).without(targets)


def _candidates(
    sets: TokenSets, trajectories: Sequence[Trajectory], logprobs: torch.Tensor | None = None
) -> Candidates:
    is_response = np.concatenate([t.response_mask for t in trajectories])
    rows = np.cumsum(is_response) - 1
    return Candidates(
        owners=torch.from_numpy(rows[sets.owners]),
        token_ids=torch.from_numpy(sets.token_ids).long(),
        num_rows=int(is_response.sum()),
        behavior_logprobs=logprobs,
    )
