"""What inference libraries report of the experts that a request's tokens were given to.

Both vLLM 0.32 and SGLang 0.5.23 give the rows of the whole prompt and of the completion without its
last token, which no layer has seen; of every decoder layer, those without experts included; and
logical ids, whatever the placement of the experts.

    vLLM     `enable_return_routed_experts`: an array, over HTTP the base64 of its .npy file, of
             uint8 or uint16
    SGLang   `enable_return_routed_experts`, and `return_routed_experts` in a request: the base64
             of int32 numbers without a shape

Shapes: P tokens of the prompt, N of the completion, L decoder layers, K experts of a token.
"""

import base64
import binascii
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.errors import RolloutError
from streamrl.types import RoutedExperts

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
