"""Every name that the SGLang engine sends or reads, compared with the real package's source."""

import ast
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from actors.engines.served.server import ServedRequest, VersionSpan
from actors.engines.sglang import messages
from actors.engines.sglang.relay import buckets_of, prefix_of
from actors.engines.sglang.server import GAUGES, launch_command, wire_request
from streamrl.types import SamplingParams
from streamrl.weights.transports import groups
from tests import sglang_package as sglang
from tests.engines import run_config

IO_STRUCT = "srt/managers/io_struct.py"
REQUESTS = [
    value
    for name, value in vars(messages).items()
    if name.endswith(("ReqInput", "AbortReq")) and value is not msgspec.Struct
]
OURS = Path(messages.__file__).parent


def a_request(**sampling: Any) -> ServedRequest:
    return ServedRequest(
        id="name-000000000007",
        prompt_token_ids=[5, 6],
        sampling=SamplingParams(max_new_tokens=9, **sampling),
        stops=frozenset([1, 7]),
        cache_salt="history/3",
    )


@pytest.mark.parametrize("ours", REQUESTS, ids=lambda ours: ours.__name__)
def test_requests_have_the_fields_of_sglangs_classes(ours):
    theirs = sglang.fields(sglang.source(IO_STRUCT), ours.__name__)
    assert set(ours.__struct_fields__) <= theirs.keys()
    required = {name for name, field in theirs.items() if field.value is None}
    assert required <= set(ours.__struct_fields__), "SGLang knows no default for it"
    for field in msgspec.structs.fields(ours):
        choices = getattr(field.type, "__args__", ())
        annotation = ast.unparse(theirs[field.name].annotation)
        if annotation.startswith("Literal"):
            assert {repr(choice) for choice in choices} <= set(re.findall(r"'\w+'", annotation))


@pytest.mark.parametrize("name", ["ContinueGeneration", "BeginWeightUpdate", "EndWeightUpdate"])
def test_requests_without_a_field_need_none(name):
    theirs = sglang.fields(sglang.source(IO_STRUCT), f"{name}ReqInput")
    assert all(field.value is not None for field in theirs.values())


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}, {"seed": 3}, {"num_top_logprobs": 4}],
)
def test_sglangs_own_decoder_takes_our_request(sampling):
    body = json.loads(msgspec.json.encode(wire_request(a_request(**sampling), 11)))
    decode = sglang.module("api/v1/api_types.py").GenerateRequest.from_json_value
    decoded = decode(body)
    assert decoded.return_sampling_mask is (True if sampling.get("top_k") else None)
    assert decoded.return_logprob is True
    assert decoded.cache_salt is not None
    for key, value in body["sampling_params"].items():
        sampling_params = str(decoded.sampling_params)
        assert f"{key}={value}" in sampling_params, sampling_params
    body["sampling_params"]["no_such_field"] = 1
    with pytest.raises(ValueError, match="no_such_field"):
        decode(body)


def test_our_classes_read_what_sglang_answers():
    api = sglang.module("api/v1/api_types.py")
    entries = [api.LogprobEntry(logprob=-0.5, token_id=8), api.LogprobEntry(token_id=9)]
    meta = api.GenerateMetaInfo(
        finish_reason=api.decode_FinishReason({"type": "length", "length": 2}),
        output_token_logprobs=api.decode_LogprobEntries([e.to_json_value() for e in entries]),
        weight_versions=[api.WeightVersionSpan(version="me/4", start=0, end=2)],
    )
    answer = api.GenerateResponse(meta_info=meta, output_ids=api.decode_TokenIds([8, 9]))
    read = msgspec.json.decode(json.dumps(answer.to_json_value()), type=messages.GenerateResponse)
    assert read.output_ids == [8, 9]
    assert read.meta_info.finish_reason.type == "length"
    assert read.meta_info.output_token_logprobs == [(-0.5, 8, None), (None, 9, None)]
    assert read.meta_info.weight_versions == [VersionSpan("me/4", 0, 2)]
    written = sglang.source("srt/managers/tokenizer_manager.py")
    for name in ("token_sampling_logprobs", "token_sampling_mask", "top_logprobs"):
        assert re.search(rf'meta_info\["output_{name}"\] = ', written), name


def test_the_routes_are_sglangs():
    served = set(re.findall(r'"(/[\w/]+)"', sglang.source("srt/entrypoints/http_server.py")))
    texts = [(OURS / name).read_text() for name in ("server.py", "relay.py")]
    named = {path for text in texts for path in re.findall(r'"(/[a-z_]+)"', text)}
    asked = named | {"/v1/models", "/metrics"}
    assert len(asked) > 12
    assert asked - served == {"/metrics"}
    assert 'Mount("/metrics"' in sglang.source("srt/utils/common.py")


def test_the_command_line_is_sglangs():
    config = run_config(
        Path("model"),
        sglang={"attention_backend": "triton", "disable_cuda_graph": True},
        engine_kwargs={"mem_fraction_static": 0.7, "disable_overlap_schedule": True},
    )
    words = launch_command(config, host="127.0.0.1", port=1, seed=0)
    known = sglang.sources("srt/arg_groups/fields")
    spelled = sglang.source("srt/server_args.py")
    flags = [word for word in words if word.startswith("--")]
    assert {"--mem-fraction-static", "--tp-size", "--skip-tokenizer-init"} <= set(flags)
    for flag in flags:
        name = flag[2:].replace("-", "_")
        assert re.search(rf"^    {name}: A\[", known, re.MULTILINE) or f'"{flag}"' in spelled, flag


def test_the_gauges_are_sglangs():
    page = sglang.sources("srt/observability")
    for name, label in GAUGES.values():
        assert f'"{name}"' in page
        assert not label or label.split('"')[1] in page


def test_sglang_takes_our_buckets_apart():
    made = torch.Generator().manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32, torch.uint8, torch.bfloat16)
    tensors = [
        (f"t{i}", torch.randint(0, 99, (3, 5 + i), generator=made).to(dtype))
        for i, dtype in enumerate(dtypes)
    ]
    theirs = sglang.module("srt/weight_sync/tensor_bucket.py").FlattenedTensorBucket
    arrived = {}
    buckets = list(buckets_of(tensors, 120))
    assert len(buckets) > 1
    for bucket in buckets:
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])
        names = [name for name, _ in bucket]
        dtype_names = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        empty = theirs.empty(names, dtype_names, [tuple(t.shape) for _, t in bucket], "cpu")
        empty.get_flattened_tensor().copy_(flat)
        arrived |= dict(empty.reconstruct_tensors())
    assert arrived.keys() == dict(tensors).keys()
    for name, tensor in tensors:
        assert torch.equal(arrived[name], tensor)


def test_sglangs_own_function_joins_our_group():
    join = sglang.function(
        "srt/utils/common.py", "init_custom_process_group", torch_release=(2, 11)
    )
    store = groups.OpenStore("127.0.0.1", 20.0)
    with ThreadPoolExecutor() as pool:
        theirs = pool.submit(
            join,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{store.port}",
            world_size=2,
            rank=1,
            group_name="a-name",
        )
        ours = store.join(prefix_of("a-name"), 2, "gloo", 20.0)
        group, got = theirs.result(120), torch.zeros(6)
        receiving = pool.submit(torch.distributed.broadcast, got, 0, group)
        ours.broadcast(torch.arange(6.0))
        receiving.result(120)
    assert got.tolist() == [0, 1, 2, 3, 4, 5]
    torch.distributed.destroy_process_group(group)
    ours.close()
