"""The experts of each token, from the engine that sampled to the trajectory that is trained."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from actors.engines.hf.batch import HfRequest, RunningBatch
from actors.engines.hf.records import ExpertWatch
from actors.engines.served.server import Labels, ServedRequest, VersionSpan
from actors.engines.sglang import messages as sglang
from actors.engines.sglang.server import completion_of as of_sglang, wire_request
from actors.engines.vllm import messages as vllm
from actors.engines.vllm.server import completion_of as of_choice
from actors.episode_record import EpisodeRecord
from streamrl import wire
from streamrl.cli.check.model import check_model
from streamrl.config import load_config
from streamrl.errors import ConfigError, CorruptMessageError, RolloutError
from streamrl.placement.limits import expert_bytes
from streamrl.types import (
    Completion,
    FinishReason,
    PackedGroup,
    RoutedExperts,
    SamplingParams,
    pack,
)
from tests.model_families import make_model
from tests.records import NUM_LAYERS, TOP_K, with_experts
from tests.rollouts import trajectories_of
from tests.tiny_model import make_llama
from tests.training import make_config, make_groups

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
SHOWN = ("Qwen3-MoE", "Mixtral", "gpt-oss", "DeepSeek-V3")
PROMPTS = ((1, 2, 3, 4, 5), (1, 2, 3), (7,), (1, 2, 3, 4, 5), (9, 8, 7, 6))


def sampled(model: Any, prompts: Sequence[tuple[int, ...]]) -> list[tuple[HfRequest, Completion]]:
    """By the decoding batch of the hf engine; some join late, and they leave at different times."""
    batch = RunningBatch(
        model,
        num_slots=8,
        max_model_len=64,
        eos_token_ids=frozenset(),
        seed=0,
        watches_experts=True,
    )
    requests = [
        HfRequest(
            prompt, SamplingParams(max_new_tokens=3 + 4 * (i % 3), keep_routed_experts=i != 2)
        )
        for i, prompt in enumerate(prompts)
    ]
    batch.join(requests[:2], 0)
    batch.step(0)
    batch.join(requests[2:], 0)
    done = batch.leave()
    while len(batch):
        batch.step(1)
        done += batch.leave()
    return done


@pytest.mark.parametrize("family", SHOWN)
def test_the_hf_engine_records_what_the_model_takes(family: str):
    model = make_model(family)
    done = sampled(model, PROMPTS)
    watch = ExpertWatch(model)
    for request, completion in done:
        experts = completion.routed_experts
        if not request.sampling.keep_routed_experts:
            assert experts is None
            continue
        assert experts is not None
        ids = torch.tensor([*request.prompt, *completion.token_ids.tolist()])
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
        [expected] = watch.of_rows([len(ids)], is_left_padded=False)
        assert experts.is_recorded.tolist() == [True] * (len(ids) - 1) + [False]
        assert np.array_equal(np.sort(experts.rows, -1), np.sort(expected[:-1], -1))
        assert experts.bytes_per_token == NUM_LAYERS * TOP_K


def test_the_hf_engine_refuses_a_model_without_experts():
    with pytest.raises(ConfigError, match=r"router_replay: was not off, and llama is no"):
        sampled(make_llama(), PROMPTS)


def test_a_group_crosses_a_process_with_and_without_them():
    group, plain = with_experts(make_groups(num_groups=1)[0]), make_groups(num_groups=1)[0]
    mixed = structs.replace(group, trajectories=(*group.trajectories[:2], *plain.trajectories[2:]))
    for sent in (group, mixed, plain):
        got = wire.decode(wire.encode(pack(sent)), PackedGroup).group()
        for mine, theirs in zip(got.trajectories, sent.trajectories, strict=True):
            if theirs.routed_experts is not None:
                assert mine.routed_experts is not None
                assert mine.routed_experts.content == theirs.routed_experts.content
            else:
                assert mine.routed_experts is None or not mine.routed_experts.num_recorded
    extra = len(wire.encode(pack(group))) - len(wire.encode(pack(plain)))
    num_recorded = group.num_tokens - len(group.trajectories)
    assert extra == pytest.approx(group.num_tokens + NUM_LAYERS * TOP_K * num_recorded, abs=32)


def test_ids_take_two_bytes_where_one_is_too_few():
    few, many = np.full((2, 3, 1), 255), np.full((3, 3, 1), 256)
    both = RoutedExperts.joined([RoutedExperts.of(few, 3), RoutedExperts.of(many)], [3, 3])
    assert both is not None
    assert (RoutedExperts.of(few).id_bytes, both.id_bytes) == (1, 2)
    assert both.experts()[:, 0, 0].tolist() == [255, 255, -1, 256, 256, 256]
    assert both.part(slice(1, 4)).experts()[:, 2, 0].tolist() == [255, -1, 256]


def test_a_damaged_record_is_refused():
    experts = RoutedExperts.of(np.zeros((2, 3, 1), np.int64), 3)
    for change in ({"num_layers": 4}, {"top_k": 2}, {"id_bytes": 2}):
        with pytest.raises(ValueError, match=r"routed_experts.data: has 6 bytes; 2 tokens"):
            structs.replace(experts, **change)
    broken = wire.encode((*structs.astuple(experts)[:1], 0, *structs.astuple(experts)[2:]))
    with pytest.raises(CorruptMessageError, match="RoutedExperts"):
        wire.decode(broken, RoutedExperts)
    group = with_experts(make_groups(num_groups=1)[0])
    first = group.trajectories[0]
    assert first.routed_experts is not None
    with pytest.raises(ValueError, match=f"are of 1 tokens; there are {first.num_tokens}"):
        structs.replace(first, routed_experts=first.routed_experts.part(slice(0, 1)))


def replied(num_prompt: int, num_tokens: int, expert: int | None) -> Completion:
    """With this expert of each token that a layer has seen."""
    rows = np.full((num_prompt + num_tokens - 1, 1, 1), expert or 0)
    return Completion(
        token_ids=np.arange(10, 10 + num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        policy_versions=np.zeros(num_tokens, np.int32),
        finish_reason=FinishReason.STOP,
        routed_experts=None if expert is None else RoutedExperts.of(rows, num_prompt + num_tokens),
    )


def experts_of(record: EpisodeRecord) -> list[list[int] | None]:
    rollout = record.rollout(FinishReason.STOP, {})
    return [
        None if t.routed_experts is None else t.routed_experts.experts()[:, 0, 0].tolist()
        for t in trajectories_of(rollout)
    ]


def test_each_turn_adds_the_experts_of_what_it_read_first():
    record = EpisodeRecord()
    record.add((1, 2), replied(2, 3, expert=1))
    assert experts_of(record) == [[1, 1, 1, 1, -1]]
    record.add((1, 2, 10, 11, 12, 5, 6), replied(7, 2, expert=2))
    assert experts_of(record) == [[1, 1, 1, 1, 2, 2, 2, 2, -1]]
    record.judge(reward=1.0, in_loss=False)
    record.add((1, 2, 10, 11, 12, 5, 6, 10, 11, 9), replied(10, 1, expert=None))
    assert experts_of(record) == [[1, 1, 1, 1, 2, 2, 2, 2, -1, -1, -1]]
    record.add((7, 7), replied(2, 1, expert=3))
    assert experts_of(record)[1] == [3, 3, -1]


def test_turns_of_different_forms_fail_the_group():
    record = EpisodeRecord()
    record.add((1, 2), replied(2, 3, expert=1))
    odd = structs.replace(
        replied(6, 1, expert=1), routed_experts=RoutedExperts.of(np.zeros((6, 2, 1), int), 7)
    )
    with pytest.raises(ValueError, match="are of 1 layers x 1 and 2 layers x 1 experts"):
        record.add((1, 2, 10, 11, 12, 5), odd)


REQUEST = ServedRequest(
    id="a",
    prompt_token_ids=[5, 6, 7],
    sampling=SamplingParams(max_new_tokens=4, keep_routed_experts=True),
    stops=frozenset([1]),
    cache_salt="",
    expert_shape=(2, 2),
)
ROWS = np.arange(4 * 2 * 2).reshape(4, 2, 2)
LABELS = Labels("me")


def as_npy(rows: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, rows, allow_pickle=False)
    return base64.b64encode(stream.getvalue()).decode()


def of_vllm(experts: str | None, finish_reason: str = "length") -> Completion:
    content = [vllm.GenerateLogProbsContent(-1.0)] * 2
    choice = vllm.GenerateTokensChoice(
        token_ids=[8, 9],
        logprobs=vllm.GenerateLogProbs(content),
        finish_reason=finish_reason,
        weight_versions=[VersionSpan(LABELS.label(0), 0, 2)],
        routed_experts=experts,
    )
    return of_choice(choice, LABELS, REQUEST)


def from_sglang(
    experts: str | None, *, finish_reason: str = "length", **changes: Any
) -> Completion:
    request = structs.replace(REQUEST, **changes)
    meta = sglang.GenerateMetaInfo(
        finish_reason=sglang.SglangFinishReason(finish_reason),
        output_token_logprobs=[(-1.0, 8, None), (-1.0, 9, None)],
        weight_versions=[VersionSpan(LABELS.label(0), 0, 2)],
        routed_experts=experts,
    )
    return of_sglang(sglang.GenerateResponse(output_ids=[8, 9], meta_info=meta), request, LABELS)


def as_int32(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4"])
def test_vllms_answer_has_the_experts_of_all_tokens_but_the_last(dtype: str):
    experts = of_vllm(as_npy(ROWS.astype(dtype))).routed_experts
    assert experts is not None
    assert np.array_equal(experts.experts(), [*ROWS, np.full((2, 2), -1)])


def test_sglangs_answer_has_the_experts_of_all_tokens_but_the_last():
    assert wire_request(REQUEST, 0).return_routed_experts
    assert not wire_request(structs.replace(REQUEST, expert_shape=(0, 0)), 0).return_routed_experts
    experts = from_sglang(as_int32(ROWS)).routed_experts
    assert experts is not None
    assert np.array_equal(experts.experts(), [*ROWS, np.full((2, 2), -1)])


def test_sglangs_tokens_behind_a_stop_leave_with_their_experts():
    sampling = structs.replace(REQUEST.sampling, ignore_eos=True)
    cut = from_sglang(as_int32(ROWS), sampling=sampling, stops=frozenset([8]))
    assert cut.routed_experts is not None
    assert np.array_equal(cut.routed_experts.experts(), [*ROWS[:3], np.full((2, 2), -1)])


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (None, "start vLLM with --enable-return-routed-experts"),
        ("###", "its experts"),
        (base64.b64encode(b"no array").decode(), "its experts"),
        (as_npy(ROWS.astype(np.float32)), "bytes as float32"),
        (as_npy(ROWS[:, 0].astype("u1")), "must hold integers of tokens, layers and experts"),
        (as_npy(np.zeros((5, 2, 2), "u1")), "the experts of 5 tokens, and no layer has seen"),
        (as_npy(np.full((4, 2, 2), -1, "<i4")), "an id is from 0"),
    ],
)
def test_an_answer_of_vllm_without_fitting_experts_costs_the_request(
    experts: str | None, expected: str
):
    with pytest.raises(RolloutError, match=expected):
        of_vllm(experts)


def test_a_header_that_promises_more_than_there_is_allocates_nothing():
    promised = base64.b64decode(as_npy(np.zeros((4, 2, 2), "u1")))
    larger = promised.replace(b"(4, 2, 2), }   ", b"(4, 2, 2000), }")
    with pytest.raises(RolloutError, match=r"16 bytes as uint8 \(4, 2, 2000\)"):
        of_vllm(base64.b64encode(larger).decode())


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (None, "start SGLang with --enable-return-routed-experts"),
        (as_int32(ROWS.flatten()[:-1]), "60 bytes, which are no rows of 2 layers x 2 experts"),
        ("###", "its experts"),
    ],
)
def test_an_answer_of_sglang_without_fitting_experts_costs_the_request(
    experts: str | None, expected: str
):
    with pytest.raises(RolloutError, match=expected):
        from_sglang(experts)


@pytest.mark.parametrize("answer", [of_vllm, from_sglang])
def test_a_request_that_was_aborted_may_have_none(answer: Any):
    assert answer(None, finish_reason="abort").routed_experts is None


def test_their_bytes_are_counted():
    """DeepSeek-V3: 61 layers, 8 of 256 experts each."""
    facts = {"num_hidden_layers": 61, "num_experts_per_tok": 8, "n_routed_experts": 256}
    assert expert_bytes(facts) == 488
    assert expert_bytes({**facts, "n_routed_experts": 257}) == 976
    plain = make_config().group_bytes(100)
    config = make_config(algorithm={"router_replay": "replay"})
    assert config.group_bytes(100, expert_bytes=488) - plain == config.max_group_size * 100 * 489


@pytest.mark.parametrize(
    ("architecture", "is_refused"), [("llama", True), ("tiny_moe.py:write", False)]
)
def test_check_refuses_the_recipe_of_a_dense_model(tmp_path, architecture, is_refused):
    """Of code of one's own it is not known what it will make."""
    (tmp_path / "tiny_moe.py").write_text("def write(folder, recipe, max_model_len): ...")
    own = f"{tmp_path}/{architecture}" if ":" in architecture else architecture
    model = {"path": str(tmp_path / "model"), "recipe": {"alphabet": "ab", "architecture": own}}
    config = make_config(model=model, algorithm={"router_replay": "replay"})
    found = [finding.sentence for finding in check_model(config)]
    assert any("is no mixture of experts" in sentence for sentence in found) == is_refused


def test_check_refuses_a_dense_model(tmp_path):
    folder = tmp_path / "dense"
    make_llama().save_pretrained(folder)
    config = make_config(model={"path": str(folder)}, algorithm={"router_replay": "record"})
    found = [finding.sentence for finding in check_model(config)]
    assert any("router_replay: was record, and llama is no mixture of experts" in m for m in found)


def test_compiled_layers_are_refused():
    with pytest.raises(ValueError, match=r"learner\.compile compiles the routers"):
        make_config(learner={"compile": True}, algorithm={"router_replay": "record"})


def test_the_setting_is_a_word_of_yaml(tmp_path):
    """Where `off` without quotes may be false."""
    file = tmp_path / "run.yaml"
    file.write_text(QUICKSTART.read_text() + "\nalgorithm: {router_replay: off}\n")
    assert load_config(file).config.algorithm.router_replay == "off"
    overrides = ["algorithm.router_replay=replay"]
    assert load_config(file, overrides).config.algorithm.records_experts
