"""One trajectory as text: its prompt, what the policy wrote, and what came in between.

Invariant: the text is that of the very tokens that the engine read and sampled, special ones
included, so a template that went wrong is seen.

`printable`: a terminal obeys control characters, a person does not see them. `piece_lengths`: which
characters of a text are whose token's; one after the other they are the beginning of the text.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

from streamrl.config.model import ModelSettings
from streamrl.types import Trajectory

# C0 and C1 controls, DEL, line separators, marks that turn the direction of text, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)


def printable(text: str) -> str:
    r"""The text with its control characters as escapes, but for line ends and tabs.

    >>> printable("red: \x1b[31m, bell: \x07")
    'red: \\x1b[31m, bell: \\x07'
    """
    return _UNSAFE.sub(lambda found: _escape(found.group()), text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


MAX_TOKENS = 1024
"""Of one message; decoding costs a call or two for each token."""
_INCOMPLETE = "\ufffd"


def piece_lengths(
    token_ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
    """How many characters of `text`, which the tokens decode to, each of the first MAX_TOKENS adds.

    0 for a token that is a part of a character, whose last token has it. Empty if the tokens do not
    add up to the text, as with a tokenizer that cleans up spaces.
    """
    lengths: list[int] = []
    begin = end = position = 0
    before = ""
    for number in range(1, min(len(token_ids), MAX_TOKENS) + 1):
        # From a token before, since some tokenizers drop the space at the beginning of a text.
        window = decode(token_ids[begin:number])
        piece = window[len(before) :]
        if not piece or window.endswith(_INCOMPLETE):
            lengths.append(0)
            continue
        if text[position : position + len(piece)] != piece:
            return ()
        lengths.append(len(piece))
        position += len(piece)
        begin, end = end, number
        before = decode(token_ids[begin:end])
    return tuple(lengths)


Decode: TypeAlias = Callable[[Sequence[int]], str]
POLICY, ENVIRONMENT = "assistant", "environment"


class Message(Struct, frozen=True):
    """Consecutive tokens of one origin: `role` is `assistant` or `environment`.

    Of what the policy wrote, where the importance weights are known, `weights` are those of its
    first tokens, and `token_lengths` how many characters of `content` each of these is.
    """

    role: str
    content: str
    token_lengths: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


class ImportanceWeights(Struct, frozen=True):
    """Of a trajectory's response tokens, as the loss has used them."""

    mean: float
    min: float
    max: float

    @classmethod
    def of(cls, weights: NDArray[np.float32]) -> "ImportanceWeights":
        """[response tokens], at least one."""
        return cls(float(weights.mean()), float(weights.min()), float(weights.max()))


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `samples.jsonl` or of a validation's file.

    `step` is the step that trained it, or the version that was validated. `version` is the oldest
    one that sampled a token, `newest_version` the newest. `sibling` is its place in its group.
    """

    step: int
    prompt_index: int
    sibling: int
    environment: str
    prompt: str
    messages: tuple[Message, ...]
    reward: float
    finish_reason: str
    num_response_tokens: int
    version: int
    newest_version: int
    staleness: int | None = None
    importance_weights: ImportanceWeights | None = None
    data_source: str = ""
    answer: str = ""
    """The reference answer, where it is known."""

    @property
    def response(self) -> str:
        """All that the policy wrote."""
        return "\n".join(m.content for m in self.messages if m.role == POLICY)


def sample_of(
    trajectory: Trajectory,
    decode: Decode,
    weights: NDArray[np.float32] | None = None,
    **facts: Any,
) -> Sample:
    """The sample of a trajectory with at least one response token; `weights` [response tokens] are
    importance weights, `facts` the other fields."""
    spans = list(_spans(trajectory))
    prompt, rest = ((), spans) if spans[0][0] == POLICY else (spans[0][1], spans[1:])
    versions = trajectory.policy_versions[trajectory.response_mask]
    if weights is not None and len(weights) != len(versions):
        weights = None
    return Sample(
        prompt=decode(prompt),
        messages=tuple(_messages(rest, decode, weights)),
        importance_weights=None if weights is None else ImportanceWeights.of(weights),
        reward=trajectory.reward,
        finish_reason=str(trajectory.finish_reason),
        num_response_tokens=trajectory.num_response_tokens,
        version=int(versions.min(initial=2**31 - 1)),
        newest_version=int(versions.max(initial=0)),
        **facts,
    )


def as_json(sample: Sample) -> dict[str, Any]:
    """Of plain types, without what is not known."""
    plain: dict[str, Any] = structs.asdict(sample)
    messages = [
        {name: value for name, value in structs.asdict(message).items() if value != ()}
        for message in sample.messages
    ]
    weights = sample.importance_weights and structs.asdict(sample.importance_weights)
    both = {**plain, "messages": messages, "importance_weights": weights}
    return {name: value for name, value in both.items() if value not in (None, "")}


def _messages(
    spans: Sequence[tuple[str, tuple[int, ...]]],
    decode: Decode,
    weights: NDArray[np.float32] | None,
) -> Iterator[Message]:
    num_before = 0
    for role, ids in spans:
        text = decode(ids)
        if role != POLICY or weights is None:
            yield Message(role, text)
            continue
        lengths = piece_lengths(ids, text, decode)
        own = weights[num_before : num_before + len(lengths)]
        num_before += len(ids)
        yield Message(role, text, lengths, tuple(float(f"{weight:.3g}") for weight in own))


def _spans(trajectory: Trajectory) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Role and token ids of each message, in their order."""
    mask = trajectory.response_mask
    starts = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    for start, end in itertools.pairwise(starts):
        ids = tuple(trajectory.token_ids[start:end].tolist())
        yield (POLICY if mask[start] else ENVIRONMENT), ids


def open_decoder(model: ModelSettings) -> Decode:
    """That of the model's tokenizer.

    Raises:
        OSError, ValueError: the model has none.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer_path, trust_remote_code=model.trust_remote_code
    )
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
