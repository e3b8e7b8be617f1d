"""From an inference library's answer to a `Completion`: log-probabilities, masks and experts of its
tokens.

Shapes: P tokens of the prompt, N of the completion, each with its candidates, L decoder layers, K
experts of a token.
"""

import base64
import binascii
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engines.requests import finish_reason
from streamrl.config import RunConfig
from streamrl.errors import RolloutError
from streamrl.types import (
    Completion,
    Int32Array,
    RoutedExperts,
    SamplingParams,
    TokenSets,
    TopLogprobs,
)

Candidates = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Ids and log-probabilities of one token's candidates, each once."""
# Rounding may put the log-probability of a certain token above 0.
_HIGHEST = 1e-3
# Tokens as likely as the last of top-k are sampled, too.
_TIES = 8
# Nothing samples a token whose probability is less than e^-1000.
_LOWEST = -1000.0
_MISSING_MASS = 1e-3


def keeps_mask(sampling: SamplingParams) -> bool:
    """Whether a completion has a sampling mask; greedy sampling is over the whole vocabulary."""
    return sampling.keep_sampling_mask and sampling.temperature > 0


def num_asked(sampling: SamplingParams) -> int:
    """How many candidates per token to ask a server for, likeliest first; 0 if none are read."""
    num_kept = sampling.top_k + _TIES if keeps_mask(sampling) else 0
    num_top = sampling.num_top_logprobs
    # One more than is read, since some servers count the sampled token among them.
    return max(num_kept, num_top + 1 if num_top else 0)


def most_asked(config: RunConfig) -> int:
    """`num_asked` for the run's own requests."""
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
    found: Iterable[Candidates], sampling: SamplingParams
) -> tuple[TokenSets | None, TopLogprobs | None]:
    """The mask and the likeliest tokens [N sets], each if the request asks for it; `found` is read
    only then.

    In the distribution sampled from, tokens outside top-k and top-p have a log-probability of minus
    infinity, so the candidates with a finite one are the sampling mask, provided that all were
    asked for (`num_asked`).
    """
    if not num_asked(sampling):
        return None, None
    possible = []
    for ids, logprobs in found:
        is_possible = logprobs > _LOWEST
        possible.append((ids[is_possible], logprobs[is_possible]))
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
    """The candidates in a server's answer, which may list the sampled token twice."""
    unique, first = np.unique(np.array(ids, np.int32), return_index=True)
    return unique, np.array(logprobs, np.float32)[first]


def _kept(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> NDArray[Any]:
    """Empty if there may be more tokens as likely as the last one asked for: a mask without them
    would mean another distribution."""
    missing = 1.0 - float(np.exp(logprobs, dtype=np.float64).sum())
    return ids if missing < _MISSING_MASS else ids[:0]


_DTYPES = frozenset({np.dtype("u1"), np.dtype("<u2"), np.dtype("<i4")})


def recorded(
    rows: NDArray[Any] | None,
    prompt: Sequence[int],
    completion: Sequence[int],
    library: str,
    reason: str | None,
) -> RoutedExperts | None:
    """The experts that the tokens of prompt and completion were given to, from the reported [P + N
    - 1, L, K] (fewer rows if the request was ended early); None if nothing was sampled, or an
    aborted request (`reason`) has none.

    Both vLLM 0.32 and SGLang 0.5.23 give the rows of all tokens but the last, which no layer has
    seen; of every decoder layer, those without experts included; and logical ids, whatever the
    placement of the experts.

    Raises:
        RolloutError: there are none, or they do not belong to these tokens.
    """
    if rows is None:
        if reason == "abort" or not completion:
            return None
        raise RolloutError(
            f"the answer has no experts of its tokens, which algorithm.router_replay records: "
            f"start {library} with --enable-return-routed-experts"
        )
    num_tokens = len(prompt) + len(completion)
    if len(rows) >= max(1, num_tokens):
        raise RolloutError(
            f"the answer is inconsistent: it has the experts of {len(rows)} tokens, and no layer "
            f"has seen the last of {num_tokens}"
        )
    try:
        return RoutedExperts.of(rows, num_tokens)
    except ValueError as error:
        raise RolloutError(f"the answer is inconsistent: {error}") from error


def from_npy(text: str) -> NDArray[Any]:
    """vLLM's array over HTTP: the base64 of a .npy file, read without trusting the size in its
    header.

    Raises:
        RolloutError: it is not an array of integers.
    """
    content = _decoded(text)
    stream = io.BytesIO(content)
    try:
        np.lib.format.read_magic(stream)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise RolloutError(f"the answer is inconsistent: its experts: {error}") from error
    data = content[stream.tell() :]
    if dtype not in _DTYPES or is_fortran or math.prod(shape) * dtype.itemsize != len(data):
        raise RolloutError(
            f"the answer is inconsistent: its experts are {len(data)} bytes as {dtype} {shape}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def from_int32(text: str, num_layers: int, top_k: int) -> NDArray[np.int32]:
    """SGLang's rows [rows, L, K], the base64 of little-endian numbers.

    Raises:
        RolloutError: the number of values does not fit rows of this shape.
    """
    content = _decoded(text)
    if len(content) % (4 * num_layers * top_k):
        raise RolloutError(
            f"the answer is inconsistent: its experts are {len(content)} bytes, which are no rows "
            f"of {num_layers} layers x {top_k} experts"
        )
    return np.frombuffer(content, "<i4").reshape(-1, num_layers, top_k)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RolloutError(f"the answer is inconsistent: its experts: {error}") from error


def completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    policy_versions: Int32Array,
    reason: str | None,
    *,
    sampling_mask: TokenSets | None = None,
    top_logprobs: TopLogprobs | None = None,
    routed_experts: RoutedExperts | None = None,
) -> Completion:
    """The completion in an answer.

    Raises:
        RolloutError: its fields are inconsistent, or impossible for any sampler.
    """
    ended = finish_reason(reason)
    outside = (p for p in logprobs if not _LOWEST <= p <= _HIGHEST)
    if (impossible := next(outside, None)) is not None:
        raise RolloutError(f"the answer is inconsistent: a log-probability is {impossible:g}")
    try:
        return Completion(
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            policy_versions=policy_versions,
            finish_reason=ended,
            sampling_mask=sampling_mask,
            top_logprobs=top_logprobs,
            routed_experts=routed_experts,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise RolloutError(f"the answer is inconsistent: {error}") from error
