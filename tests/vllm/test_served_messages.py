"""Every name in a request to a vLLM elsewhere, compared with vLLM's own classes."""

import dataclasses
import json

import msgspec
import pytest
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.entrypoints.scale_out.token_in_token_out import protocol
from vllm.outputs import WeightVersionSpan

from actors.engines.served.server import ServedRequest, VersionSpan
from actors.engines.vllm import messages
from actors.engines.vllm.server import wire_request
from streamrl import types


def test_vllms_own_class_takes_our_request():
    request = ServedRequest(
        id="a-1",
        prompt_token_ids=[5, 6],
        sampling=types.SamplingParams(max_new_tokens=9, top_k=3, seed=4, min_new_tokens=2),
        stops=frozenset([1]),
        cache_salt="a-0",
    )
    body = json.loads(msgspec.json.encode(wire_request(request)))
    taken = protocol.GenerateRequest.model_validate(body)
    assert set(body) <= set(protocol.GenerateRequest.model_fields)
    assert (taken.request_id, taken.token_ids, taken.cache_salt) == ("a-1", [5, 6], "a-0")
    for name, value in body["sampling_params"].items():
        assert getattr(taken.sampling_params, name) == value, name
    with pytest.raises(AttributeError):
        SamplingParams().no_such_field  # noqa: B018


@pytest.mark.parametrize(
    "ours",
    [
        messages.GenerateLogProb,
        messages.GenerateLogProbs,
        messages.GenerateTokensChoice,
        messages.GenerateTokensResponse,
    ],
)
def test_we_read_fields_that_vllm_writes(ours):
    theirs = getattr(protocol, ours.__name__)
    assert set(ours.__struct_fields__) <= set(theirs.model_fields)


def test_an_update_has_vllms_fields():
    theirs = {field.name for field in dataclasses.fields(WeightTransferUpdateRequest)}
    assert set(messages.WeightTransferUpdateRequest.__struct_fields__) <= theirs


def test_a_span_is_vllms():
    written = {"version": "a/3", "start": 0, "end": 2}
    theirs = WeightVersionSpan(**written)
    assert all(getattr(theirs, name) == value for name, value in written.items())
    assert msgspec.convert(written, VersionSpan) == VersionSpan("a/3", 0, 2)
