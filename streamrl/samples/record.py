"""One trajectory as text: its prompt, what the policy wrote, and what came in between.

Invariant: the text is decoded from the very tokens that the engine read and sampled, special ones
included, so a wrong template is visible. `Sample.without_markup` gives what people read.

`printable` escapes control characters, which a terminal obeys and a person does not see.
`piece_lengths` says which characters of a text come from which token.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
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
    r"""The text with control characters as escapes, except line ends and tabs.

    >>> printable("red: \x1b[31m, bell: \x07")
    'red: \\x1b[31m, bell: \\x07'
    """
    return _UNSAFE.sub(lambda found: _escape(found.group()), text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


_GAP = " [...] "


def cut(text: str, longest: int) -> str:
    """Shorten a text to `longest` characters by leaving out its middle."""
    half = (longest - len(_GAP)) // 2
    return text if len(text) <= longest else f"{text[:half]}{_GAP}{text[-half:]}"


def shortened_answer(text: str) -> str:
    """An expected or extracted answer as it is kept for people. Lone surrogates, which JSON allows
    and UTF-8 does not, become question marks."""
    return cut(text, 200).encode(errors="replace").decode()


# Chat templates announce whose turn begins with one of these, alone on its line.
_ROLE = re.compile(r"\A(assistant|developer|environment|ipython|model|system|tool|user)\s*(\n|$)")


def without_markup(text: str, special_tokens: Collection[str]) -> str:
    r"""A text without these tokens, and without the roles that they open.

    >>> without_markup("<|im_start|>user\nWhy?<|im_end|>\n", {"<|im_start|>", "<|im_end|>"})
    'Why?'
    """
    if not any(token in text for token in special_tokens):
        return text
    longest_first = sorted(special_tokens, key=len, reverse=True)
    first, *others = re.split("|".join(map(re.escape, longest_first)), text)
    parts = (first, *(_ROLE.sub("", part) for part in others))
    return "\n".join(part.strip() for part in parts if part.strip())


MAX_TOKENS = 1024
"""The most tokens of one message; each token costs one or two calls to decode."""
_INCOMPLETE = "\ufffd"


def piece_lengths(
    token_ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
    """How many characters each of the first MAX_TOKENS tokens adds to `text`, which the tokens
    decode to.

    A character made of several tokens counts for the last of them; the others get 0. Empty if the
    tokens do not add up to the text, as with a tokenizer that cleans up spaces.
    """
    lengths: list[int] = []
    begin = end = position = 0
    before = ""
    for number in range(1, min(len(token_ids), MAX_TOKENS) + 1):
        # Begin at an earlier token, since some tokenizers drop the space at the beginning of a
        # text.
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


class Message(Struct, frozen=True, omit_defaults=True):
    """Consecutive tokens of one origin: `role` is `assistant` or `environment`.

    If the importance weights of a message of the policy are known, `weights` are those of its first
    tokens, and `token_lengths` says how many characters of `content` each of these tokens has.
    """

    role: str
    content: str
    token_lengths: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


class ImportanceWeights(Struct, frozen=True):
    """Importance weights over a trajectory's response tokens, as the loss used them."""

    mean: float
    min: float
    max: float


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `samples.jsonl` or of a validation's file.

    `step` is the step that trained it, or the validated version. `version` is the oldest version
    that sampled a token, `newest_version` the newest. `sibling` is its place in its group.
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
    """The expected answer, if known."""
    extracted: str | None = None
    """The answer that a reward found in the response; "" if it found none, None if no reward looks
    for one."""
    rewards: dict[str, float] = {}
    """The value of each reward, by name."""
    special_tokens: tuple[str, ...] = ()
    """The tokenizer's special tokens that occur in the texts."""

    @property
    def response(self) -> str:
        return "\n".join(m.content for m in self.messages if m.role == POLICY)

    def without_markup(self) -> "Sample":
        """The sample without the chat template's tokens in its texts, and without data about single
        tokens."""
        if not self.special_tokens:
            return self
        messages = (
            Message(m.role, without_markup(m.content, self.special_tokens)) for m in self.messages
        )
        prompt = without_markup(self.prompt, self.special_tokens)
        return structs.replace(self, prompt=prompt, messages=tuple(messages), special_tokens=())


@dataclass(frozen=True)
class Decoder:
    """Decodes by a tokenizer; `special_tokens` are the texts of its special tokens."""

    decode: Decode
    special_tokens: tuple[str, ...] = ()


def sample_of(
    trajectory: Trajectory,
    decoder: Decoder,
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
    used = None
    if weights is not None:
        used = ImportanceWeights(*map(float, (weights.mean(), weights.min(), weights.max())))
    text, messages = decoder.decode(prompt), tuple(_messages(rest, decoder.decode, weights))
    texts = (text, *(message.content for message in messages))
    return Sample(
        prompt=text,
        messages=messages,
        extracted=trajectory.extracted,
        # Without the rewards' further metrics.
        rewards={
            name.removeprefix("reward/"): value
            for name, value in trajectory.metrics.items()
            if name.startswith("reward/") and name.count("/") == 1
        },
        special_tokens=tuple(t for t in decoder.special_tokens if any(t in one for one in texts)),
        importance_weights=used,
        reward=trajectory.reward,
        finish_reason=str(trajectory.finish_reason),
        num_response_tokens=trajectory.num_response_tokens,
        version=int(versions.min(initial=2**31 - 1)),
        newest_version=int(versions.max(initial=0)),
        **facts,
    )


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


def open_decoder(model: ModelSettings) -> Decoder:
    """Make the decoder of the model's tokenizer.

    Raises:
        OSError, ValueError: the model has none.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer_path, trust_remote_code=model.trust_remote_code
    )
    added = tokenizer.added_tokens_decoder.values()
    special = {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    return Decoder(
        lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=False)),
        tuple(sorted(special)),
    )
