"""What an inference library's answer says of a request's tokens beside their ids.

`sets_of`: what log-probabilities say of the tokens that were not sampled. Log-probabilities of the
distribution that is sampled from are minus infinity outside of what top-k and top-p left, so the
candidates with another one are the sampling mask, as long as all of them are asked for:
`num_asked`.

`recorded`: what is reported of the experts that the tokens were given to. Both vLLM 0.32 and SGLang
0.5.23 give the rows of the whole prompt and of the completion without its last token, which no
layer has seen; of every decoder layer, those without experts included; and logical ids, whatever
the placement of the experts.

    vLLM     `enable_return_routed_experts`: an array, over HTTP the base64 of its .npy file, of
             uint8 or uint16
    SGLang   `enable_return_routed_experts`, and `return_routed_experts` in a request: the base64
             of int32 numbers without a shape

Shapes: P tokens of the prompt, N of the completion, each with its candidates, L decoder layers, K
experts of a token.
"""

import base64
import binascii
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.config import RunConfig
from streamrl.errors import RolloutError
from streamrl.types import RoutedExperts, SamplingParams, TokenSets, TopLogprobs

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


_DTYPES = frozenset({np.dtype("u1"), np.dtype("<u2"), np.dtype("<i4")})


def recorded(
    rows: NDArray[Any] | None,
    prompt: Sequence[int],
    completion: Sequence[int],
    library: str,
    *,
    is_aborted: bool = False,
) -> RoutedExperts | None:
    """Of the prompt and the completion, from what was reported [P + N - 1, L, K], or less of a
    request that was ended; None if nothing was sampled, or a request that was aborted has none.

    Raises:
        RolloutError: there are none, or they are not of these tokens.
    """
    if rows is None and (is_aborted or not completion):
        return None
    if rows is None:
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
    """The array in the base64 of a .npy file, without a copy of what its header may promise.

    Raises:
        RolloutError: it is not one of integers.
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
    """[rows, L, K] of the base64 of little-endian numbers.

    Raises:
        RolloutError: they are not as many as rows of this form have.
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
