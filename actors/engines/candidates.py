"""What an inference server's log-probabilities say of the tokens that it did not sample.

Log-probabilities of the distribution that is sampled from are minus infinity outside of what top-k
and top-p left, so the candidates with another one are the sampling mask, as long as all of them are
asked for: `num_asked`.

Shapes: N tokens of a completion, each with its candidates, the sampled token among them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.config import RunConfig
from streamrl.types import SamplingParams, TokenSets, TopLogprobs

Candidates = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Ids and log-probabilities of one token's candidates, each once."""
# Tokens as likely as the last of top-k are sampled, too.
_TIES = 8
# Nothing samples a token whose probability is less than e^-1000.
_LOWEST = -1000.0
_MISSING_MASS = 1e-3


def keeps_mask(sampling: SamplingParams) -> bool:
    """Whether a completion comes with its mask; a greedy one is of the whole vocabulary."""
    return sampling.keep_sampling_mask and sampling.temperature > 0


def num_asked(sampling: SamplingParams) -> int:
    """Candidates of each token that a server is asked for, likeliest first; 0 if none are read."""
    num_kept = sampling.top_k + _TIES if keeps_mask(sampling) else 0
    num_top = sampling.num_top_logprobs
    # One more than are read, since some servers count the sampled token among them.
    return max(num_kept, num_top + 1 if num_top else 0)


def most_asked(config: RunConfig) -> int:
    """`num_asked` of the run's own requests."""
    generator = config.generator
    return num_asked(
        SamplingParams(
            max_new_tokens=1,
            top_k=generator.top_k,
            keep_sampling_mask=generator.keep_sampling_mask,
            num_top_logprobs=config.num_top_logprobs,
        )
    )


def sets_of(
    found: Sequence[Candidates], sampling: SamplingParams
) -> tuple[TokenSets | None, TopLogprobs | None]:
    """The mask and the likeliest tokens [N sets], each if the request asks for it."""
    possible = [_possible(ids, logprobs) for ids, logprobs in found]
    mask = TokenSets.of([_kept(*one) for one in possible]) if keeps_mask(sampling) else None
    top = top_of(possible, sampling.num_top_logprobs) if sampling.num_top_logprobs else None
    return mask, top


def top_of(found: Sequence[Candidates], num_top: int) -> TopLogprobs:
    likeliest = [np.argsort(-logprobs, kind="stable")[:num_top] for _, logprobs in found]
    pairs = list(zip(found, likeliest, strict=True))
    return TopLogprobs.of(
        [ids[order] for (ids, _), order in pairs],
        [logprobs[order] for (_, logprobs), order in pairs],
    )


def candidates(ids: Sequence[int], logprobs: Sequence[float]) -> Candidates:
    """Of a server's answer, in which the sampled token may stand twice."""
    unique, first = np.unique(np.array(ids, np.int32), return_index=True)
    return unique, np.array(logprobs, np.float32)[first]


def _possible(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> Candidates:
    is_possible = logprobs > _LOWEST
    return ids[is_possible], logprobs[is_possible]


def _kept(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> NDArray[Any]:
    """Empty where more tokens than were asked for are as likely as the last: a mask without them
    would be another distribution."""
    missing = 1.0 - float(np.exp(logprobs, dtype=np.float64).sum())
    return ids if missing < _MISSING_MASS else ids[:0]
