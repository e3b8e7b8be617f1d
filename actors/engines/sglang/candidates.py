"""What SGLang reports of the tokens that it did not sample.

Its sampling mask has the ids alone, and its top log-probabilities are those before truncation: a
token and its candidates have the same difference between the two distributions.
"""

import math
from collections.abc import Sequence

from actors.engines.candidates import candidates, keeps_mask, top_of
from actors.engines.served.server import Request
from actors.engines.sglang.messages import GenerateMetaInfo
from streamrl.errors import RolloutError
from streamrl.types import SamplingParams, TokenSets, TopLogprobs


def is_truncated(request: Request) -> bool:
    """Whether top-k or top-p excludes candidates; greedy sampling reports the full distribution."""
    sampling = request.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def sets_of(
    meta: GenerateMetaInfo, request: Request, num_tokens: int
) -> tuple[TokenSets | None, TopLogprobs | None]:
    """The mask and the likeliest tokens of the first `num_tokens`, each if it was asked for.

    Raises:
        RolloutError: they are not in the answer.
    """
    sampling = request.sampling
    masks = (meta.output_token_sampling_mask or [])[:num_tokens]
    found = (meta.output_top_logprobs or [])[:num_tokens]
    _require(masks, "sampling mask", num_tokens, is_asked=is_truncated(request))
    _require(found, "top log-probabilities", num_tokens, is_asked=sampling.num_top_logprobs > 0)
    mask = None
    if keeps_mask(sampling):
        mask = TokenSets.of([candidates(ids, [0.0] * len(ids))[0] for ids in masks])
    if not sampling.num_top_logprobs:
        return mask, None
    return mask, _top(meta, sampling, masks if is_truncated(request) else None, num_tokens)


def _top(
    meta: GenerateMetaInfo, sampling: SamplingParams, masks: list[list[int]] | None, num_tokens: int
) -> TopLogprobs:
    each = []
    for i, entries in enumerate((meta.output_top_logprobs or [])[:num_tokens]):
        rise, kept = 0.0, None
        if masks is not None and meta.output_token_sampling_logprobs is not None:
            plain = meta.output_token_logprobs[i][0]
            rise = meta.output_token_sampling_logprobs[i] - (math.nan if plain is None else plain)
            kept = frozenset(masks[i])
        pairs = [(e[1], e[0]) for e in entries or [] if kept is None or e[1] in kept]
        logprobs = [math.nan if logprob is None else logprob + rise for _, logprob in pairs]
        if not all(map(math.isfinite, logprobs)):
            raise RolloutError("the answer is inconsistent: a log-probability is not finite")
        each.append(candidates([token_id for token_id, _ in pairs], logprobs))
    return top_of(each, sampling.num_top_logprobs)


def _require(found: Sequence[object], name: str, num_tokens: int, *, is_asked: bool) -> None:
    if is_asked and len(found) != num_tokens:
        raise RolloutError(f"the answer has no {name} for {num_tokens - len(found)} of its tokens")
