"""Replies of vLLM and SGLang with anything changed: sound facts, or an error of that request."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from actors.engines.served.http import RefusedError, decoded
from actors.engines.served.server import Labels, ServedRequest, require_sound
from actors.engines.sglang import messages as sglang
from actors.engines.sglang.server import completion_of as of_sglang
from actors.engines.vllm import messages as vllm
from actors.engines.vllm.server import completion_of as of_choice
from streamrl.errors import RolloutError
from streamrl.types import Completion, FinishReason, SamplingParams, Trajectory
from tests.standins.hostile_server import good_reply

VOCAB_SIZE, NEWEST_VERSION = 40, 3
LABELS = Labels("me")
REQUEST = ServedRequest(
    id="a",
    prompt_token_ids=[5],
    sampling=SamplingParams(max_new_tokens=4),
    stops=frozenset([1]),
    cache_salt="",
)


def read(kind: str, content: bytes) -> Completion:
    if kind == "vllm":
        choice = decoded("/generate", content, vllm.GenerateTokensResponse).choices[0]
        answer = of_choice(choice, LABELS, REQUEST)
    else:
        response = decoded("/generate", content, sglang.GenerateResponse)
        answer = of_sglang(response, REQUEST, LABELS)
    require_sound(answer, REQUEST, vocab_size=VOCAB_SIZE, newest_version=NEWEST_VERSION)
    return answer


def assert_sound_or_refused(kind: str, content: bytes) -> None:
    try:
        answer = read(kind, content)
    except (RefusedError, RolloutError):
        return
    assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)
    assert len(answer.token_ids) <= REQUEST.sampling.max_new_tokens
    assert ((answer.token_ids >= 0) & (answer.token_ids < VOCAB_SIZE)).all()
    assert (np.isfinite(answer.logprobs) & (answer.logprobs <= 1e-3)).all()
    versions = answer.policy_versions
    assert ((versions >= 0) & (versions <= NEWEST_VERSION)).all()
    if len(answer.token_ids):
        Trajectory(
            token_ids=answer.token_ids,
            response_mask=versions >= 0,
            behavior_logprobs=answer.logprobs,
            policy_versions=versions,
            reward=0.0,
            finish_reason=answer.finish_reason,
        )


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside, the outermost first."""
    yield at
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], by: Any) -> Any:
    """The same with another value at the path; REMOVED leaves it out."""
    if not at:
        return None if by is REMOVED else by
    key, *rest = at
    if by is REMOVED and not rest:
        if isinstance(value, dict):
            return {name: part for name, part in value.items() if name != key}
        return [*value[:key], *value[key + 1 :]]
    part = replaced(value[key], tuple(rest), by)
    if isinstance(value, dict):
        return {**value, key: part}
    return [*value[:key], part, *value[key + 1 :]]


REMOVED = object()
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([-1, 0, VOCAB_SIZE, 2**31 - 1, 2**31, 2**63, 2**64, 10**400]),
    st.floats(),
)
LABEL = st.sampled_from(
    ["me//0", "me/l/3", "me/l/4", "me/l/-1", "me/l/1e9", "me// 1", "me/", "you//0", "/", ""]
)
ATOMS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), LABEL)
CHANGES = st.one_of(
    st.just(REMOVED),
    st.recursive(
        ATOMS,
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ),
)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@settings(max_examples=100)
@given(data=st.data())
def test_a_reply_with_anything_changed_is_sound_or_refused(kind, data):
    body: Any = good_reply("me/l/3", data.draw(st.integers(0, 4))).form(kind)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(list(places(body))))
        body = replaced(body, at, data.draw(CHANGES))
    assert_sound_or_refused(kind, json.dumps(body).encode())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@settings(max_examples=50)
@given(data=st.data())
def test_bytes_with_anything_changed_are_sound_or_refused(kind, data):
    content = json.dumps(good_reply("me/l/3", 3).form(kind)).encode()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    assert_sound_or_refused(
        kind, content[:start] + data.draw(st.binary(max_size=9)) + content[end:]
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_reply_that_is_changed_is_right(kind):
    answer = read(kind, json.dumps(good_reply("me/l/3", 3).form(kind)).encode())
    assert answer.token_ids.tolist() == [3, 4, 5]
    assert answer.policy_versions.tolist() == [3, 3, 3]
