"""Teachers by url: what engines answer, in the formats of their releases, and what is no answer."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from actors.prompts.rows import for_teachers
from actors.rendering.renderer import ChatRenderer
from actors.rewards.remote.teachers import RemoteTeachers
from streamrl.config.algorithm.distillation import DistillationSettings
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Prompt
from streamrl.types import Media, TrajectoryGroup
from tests.records import lease_one
from tests.tiny_model import make_llama, make_tokenizer
from tests.training import make_groups
from tests.unit.rewards.services import Service, serving
from tests.unit.test_generator import Run

Answer = Callable[[dict[str, Any]], tuple[int, Any]]
TOKENIZER = make_tokenizer()
GROUP = structs.replace(make_groups(num_groups=1, group_size=3)[0], teacher="", teacher_prompt=None)


def renderer() -> ChatRenderer:
    return ChatRenderer(make_tokenizer(), DataSettings(source="addition", max_prompt_length=10))


def all_logprobs_of(token_ids: list[int]) -> torch.Tensor:
    """[N, V] of what follows each token, under the tiny model."""
    with torch.no_grad():
        logits = make_llama().eval()(input_ids=torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


def logprobs_of(token_ids: list[int]) -> list[float]:
    """Of each token but the first, under the tiny model."""
    ids = torch.tensor(token_ids)
    return all_logprobs_of(token_ids)[:-1].gather(1, ids[1:, None])[:, 0].tolist()


def detokenized(body: dict[str, Any], name: str) -> tuple[int, Any]:
    return 200, {name: TOKENIZER.decode(body["tokens"]), "id": "unread"}


def vllm(body: dict[str, Any]) -> tuple[int, Any]:
    """As vLLM 0.26: `prompt_logprobs` 0 has the token itself alone, with its rank."""
    if "tokens" in body:
        return detokenized(body, "prompt")
    assert body["max_tokens"] == 1
    top_k, whole = body["prompt_logprobs"], all_logprobs_of(body["prompt"])
    pairs = zip(body["prompt"][1:], whole, strict=False)
    rows = [
        {
            str(i): {"logprob": float(row[i]), "rank": 3, "decoded_token": "x"}
            for i in dict.fromkeys([own, *row.topk(top_k).indices.tolist()])
        }
        for own, row in pairs
    ]
    choice = {"index": 0, "text": "x", "prompt_logprobs": [None, *rows], "finish_reason": "length"}
    return 200, {"id": "cmpl-1", "choices": [choice], "usage": {"prompt_tokens": len(rows) + 1}}


def sglang(body: dict[str, Any]) -> tuple[int, Any]:
    """As SGLang: from `logprob_start_len` on, without one of that token itself."""
    if "tokens" in body:
        return detokenized(body, "text")
    assert body["return_logprob"]
    first, ids = body["logprob_start_len"], body["input_ids"]
    logprobs = [None, *logprobs_of(ids)[first:]]
    rows = [[logprob, own, None] for logprob, own in zip(logprobs, ids[first:], strict=True)]
    meta = {"input_token_logprobs": rows}
    if top_k := body["top_logprobs_num"]:
        tops = [row.topk(top_k) for row in all_logprobs_of(ids)[first:-1]]
        pairs = [zip(top.values.tolist(), top.indices.tolist(), strict=True) for top in tops]
        meta["input_top_logprobs"] = [None, *([[*one, None] for one in row] for row in pairs)]
    return 200, {"text": "", "output_ids": [], "meta_info": meta}


def teachers(*urls: str, engine: str = "vllm", **settings: Any) -> RemoteTeachers:
    named = [{"name": f"t{i}", "url": url, "engine": engine} for i, url in enumerate(urls)]
    section = {"teachers": named, "retries": 0, **settings}
    return RemoteTeachers(DistillationSettings.model_validate(section), renderer())


async def scored(answer: Answer, delay_s: float = 0.0, **settings: Any) -> TrajectoryGroup:
    async with serving(answer, delay_s) as service:
        return await teachers(service.url, **settings).score(GROUP)


def test_an_episode_with_images_is_not_scored_by_its_places_of_them():
    picture = Media.image(b"a")
    first, *others = GROUP.trajectories
    seen = (structs.replace(first, media=(picture.id,)), *others)
    group = structs.replace(GROUP, trajectories=seen, media=(picture,))
    with pytest.raises(RolloutError, match=r"teacher t0: .* an episode has images"):
        asyncio.run(teachers("http://127.0.0.1:1").score(group))


def wanted_of(group: TrajectoryGroup) -> list[np.ndarray[Any, Any]]:
    return [
        np.where(t.response_mask, [0.0, *logprobs_of(t.token_ids.tolist())], 0)
        for t in group.trajectories
    ]


@pytest.mark.parametrize(("answer", "engine"), [(vllm, "vllm"), (sglang, "sglang")])
def test_each_sampled_token_has_the_log_probability_that_the_engine_answers(
    answer: Answer, engine: str
):
    group = asyncio.run(scored(answer, engine=engine))
    for t, wanted in zip(group.trajectories, wanted_of(GROUP), strict=True):
        assert t.teacher_logprobs is not None
        assert t.teacher_logprobs.dtype == np.float32
        np.testing.assert_allclose(t.teacher_logprobs, wanted, atol=1e-5)


@pytest.mark.parametrize(("answer", "engine"), [(vllm, "vllm"), (sglang, "sglang")])
def test_the_likeliest_at_each_place_are_those_that_the_engine_answers(answer: Answer, engine: str):
    group = asyncio.run(scored(answer, engine=engine, top_k=3))
    for t, wanted in zip(group.trajectories, wanted_of(GROUP), strict=True):
        np.testing.assert_allclose(t.teacher_logprobs, wanted, atol=1e-5)
        top = t.teacher_top_logprobs
        assert top is not None
        assert (top.counts == np.where(t.response_mask, 3, 0)).all()
        places = np.flatnonzero(t.response_mask)
        rows = all_logprobs_of(t.token_ids.tolist())[places - 1].topk(3)
        halves = top.logprobs.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(top.logprobs, halves)
        np.testing.assert_allclose(top.logprobs.reshape(-1, 3), rows.values, rtol=2**-11, atol=1e-5)
        assert top.token_ids.reshape(-1, 3).tolist() == rows.indices.tolist()


def likeliest(change: Callable[[dict[str, Any]], Any]) -> Answer:
    """vLLM whose likeliest tokens at the last place are other ones."""
    return changed(lambda rows: change(rows[-1]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda row: [row.pop(key) for key in list(row)[1:]], "with 1 of the likeliest tokens wh"),
        (lambda row: [value.update(logprob=3.5) for value in list(row.values())[1:]], "of 3.5"),
        (lambda row: row.update({str(2**40): {"logprob": -1.0}}), "unexpected answer"),
    ],
)
def test_likeliest_tokens_that_are_none_fail_the_group(change: Any, sentence: str):
    with pytest.raises(RolloutError, match=sentence):
        asyncio.run(scored(likeliest(change), top_k=3))


def test_a_likeliest_token_without_a_probability_is_left_to_the_others():
    def change(row: dict[str, Any]) -> None:
        for value in list(row.values())[2:]:
            value["logprob"] = -9999.0

    group = asyncio.run(scored(likeliest(change), top_k=3))
    for t in group.trajectories:
        assert t.teacher_top_logprobs is not None
        counts = t.teacher_top_logprobs.counts[t.response_mask]
        assert counts[:-1].tolist() == [3] * (len(counts) - 1)
        assert counts[-1] in (1, 2)


def test_an_answer_may_be_as_long_as_its_candidates_make_it():
    """33 candidates of 9,000 tokens, in vLLM's words, are more than other answers may have."""
    num_tokens, word = 9000, "x" * 40
    mask = np.arange(num_tokens) > 3
    t = structs.replace(
        GROUP.trajectories[0],
        token_ids=np.full(num_tokens, 5, np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -1, 0).astype(np.float32),
        policy_versions=np.where(mask, 3, -1).astype(np.int32),
    )
    group = structs.replace(GROUP, trajectories=(t,), episode_indices=())
    ids = (5, *range(100, 132))
    row = {str(i): {"logprob": -1.25, "rank": i, "decoded_token": word} for i in ids}

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "tokens" in body:
            return detokenized(body, "prompt")
        return 200, {"choices": [{"prompt_logprobs": [None, *[row] * (num_tokens - 1)]}]}

    async def run() -> TrajectoryGroup:
        async with serving(answer) as service:
            return await teachers(service.url, top_k=32).score(group)

    top = asyncio.run(run()).trajectories[0].teacher_top_logprobs
    assert top is not None
    assert len(top.token_ids) == 32 * mask.sum()


def test_an_engine_reads_what_stands_in_the_place_of_the_prompt():
    async def run() -> tuple[TrajectoryGroup, list[list[int]]]:
        async with serving(vllm) as service:
            shown = np.array([7, 8, 9, 10], np.int32)
            group = structs.replace(GROUP, teacher_prompt=shown)
            group = await teachers(service.url).score(group)
            return group, [body["prompt"] for _, _, body in service.requests if "prompt" in body]

    group, asked = asyncio.run(run())
    for t, token_ids in zip(group.trajectories, asked, strict=True):
        response = t.token_ids[t.response_mask].tolist()
        assert token_ids == [7, 8, 9, 10, *response]
        assert t.teacher_logprobs is not None
        found = t.teacher_logprobs[t.response_mask]
        np.testing.assert_allclose(found, logprobs_of(token_ids)[3:], atol=1e-5)
        assert not t.teacher_logprobs[~t.response_mask].any()


def test_two_teachers_are_weighed_and_a_row_chooses_one():
    async def run() -> tuple[TrajectoryGroup, TrajectoryGroup, list[Service]]:
        async with serving(vllm) as first, serving(vllm) as second:
            mixed = await teachers(first.url, second.url).score(GROUP)
            one = teachers(first.url, second.url, column="who")
            group = structs.replace(GROUP, teacher=one.named_by({"who": "t1"}))
            first.requests.clear()
            return mixed, await one.score(group), [first, second]

    mixed, chosen, services = asyncio.run(run())
    for group in (mixed, chosen):
        for t, wanted in zip(group.trajectories, wanted_of(GROUP), strict=True):
            np.testing.assert_allclose(t.teacher_logprobs, wanted, atol=1e-5)
    assert not services[0].requests
    assert chosen.teacher == "t1"


def changed(change: Callable[[list[Any]], Any]) -> Answer:
    """vLLM whose `prompt_logprobs` are not what was asked for."""

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        status, value = vllm(body)
        if "tokens" not in body:
            change(value["choices"][0]["prompt_logprobs"])
        return status, value

    return answer


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (changed(lambda rows: rows.pop()), r"t0: answered with \d+ log-probabilities for \d+ tok"),
        (changed(lambda rows: rows.append(None)), "log-probabilities for"),
        (changed(lambda rows: rows.__setitem__(-1, None)), "without a log-probability of token"),
        (
            changed(lambda rows: rows.__setitem__(-1, {"99999": {"logprob": -1.0}})),
            "without a log-probability of token",
        ),
        # vLLM's minus infinity, and a probability where its logarithm was asked for.
        (
            changed(lambda rows: [row.update(logprob=-9999) for row in rows[-1].values()]),
            "without a log-probability of token",
        ),
        (
            changed(lambda rows: [row.update(logprob=0.9) for row in rows[-1].values()]),
            "without a log-probability of token",
        ),
        (changed(lambda rows: rows.__setitem__(-1, {"x": {"logprob": -1.0}})), "unexpected answer"),
        (changed(lambda rows: rows.__setitem__(-1, {"-1": {"logprob": -1.0}})), "unexpected ans"),
        (lambda body: (500, {"error": "broken"}), "answered with 500: broken"),
        (lambda body: (200, {"choices": []}), "answered with 0 log-probabilities"),
        (lambda body: (200, {"choices": "none"}), "unexpected answer"),
    ],
)
def test_an_answer_that_is_none_fails_the_group_with_the_reason(answer: Answer, sentence: str):
    def known(body: dict[str, Any]) -> tuple[int, Any]:
        return vllm(body) if "tokens" in body else answer(body)

    with pytest.raises(RolloutError, match=sentence):
        asyncio.run(scored(known))


def test_a_late_teacher_fails_the_group_with_the_reason():
    with pytest.raises(RolloutError, match=r"not answered within .*0.2 s"):
        asyncio.run(scored(vllm, delay_s=3.0, timeout_s=0.2))


def test_a_request_that_fails_is_made_again():
    numbers = {"failed": 0}

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "tokens" not in body and numbers["failed"] < 2:
            numbers["failed"] += 1
            return 503, {"error": "busy"}
        return vllm(body)

    group = asyncio.run(scored(answer, retries=2))
    assert numbers["failed"] == 2
    assert all(t.teacher_logprobs is not None for t in group.trajectories)


def test_one_that_is_away_is_asked_again_and_the_tokenizers_are_compared_then():
    numbers = {"compared": 0}

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        numbers["compared"] += "tokens" in body
        return (502, {}) if "tokens" in body and numbers["compared"] == 1 else vllm(body)

    asyncio.run(scored(answer, retries=1))
    assert numbers["compared"] == 2


def test_no_more_requests_at_a_time_than_the_teacher_may_have():
    async def run() -> int:
        async with serving(vllm, 0.01) as service:
            await teachers(service.url, max_concurrent=1).score(GROUP)
            return service.most

    assert asyncio.run(run()) == 1


def test_another_tokenizer_is_refused_with_what_it_makes_of_the_ids():
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return (200, {"prompt": "something else"}) if "tokens" in body else vllm(body)

    with pytest.raises(ConfigError) as caught:
        asyncio.run(scored(answer))
    error = caught.value
    assert "algorithm.distillation.teachers.0.url" in str(error)
    assert "has another tokenizer than the policy: of" in str(error)
    assert "'something else' where the policy has" in str(error)


def test_an_engine_without_a_tokenizer_is_taken_at_its_word(caplog: pytest.LogCaptureFixture):
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return (404, {"detail": "Not Found"}) if "tokens" in body else vllm(body)

    asyncio.run(scored(answer))
    assert "teacher t0: its tokenizer is not compared" in caplog.text


def test_a_row_that_names_no_teacher_fails_its_group():
    both = teachers("http://127.0.0.1:1", "http://127.0.0.1:2", column="who")
    with pytest.raises(RolloutError, match="row names teacher 't2'; allowed: t0, t1"):
        both.named_by({"who": "t2"})
    with pytest.raises(RolloutError, match="column who of the row names teacher None"):
        both.named_by({})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"template": "{% if answer == '' %}x{% endif %}"}, "template: renders nothing"),
        ({"template": "{{ hint }}"}, "template: 'hint' is undefined"),
        ({"column": "who"}, "column who of the row names teacher None"),
    ],
)
def test_a_prompt_that_cannot_be_taught_is_not_sampled(settings: dict[str, Any], sentence: str):
    async def run() -> None:
        of_run = Run()
        runner = dataclasses.replace(
            of_run.runner,
            renderer=renderer(),
            teachers=teachers("http://127.0.0.1:1", "http://127.0.0.1:2", **settings),
        )
        await of_run.learner.attach(0, None)
        with pytest.raises(RolloutError, match=sentence):
            await runner.run(await lease_one(of_run.learner, "a", "g", 0.0))
        assert not of_run.engine.begun

    asyncio.run(run())


def test_a_key_that_is_not_there_is_refused():
    named = {"name": "a", "url": "http://127.0.0.1:1", "api_key_env": "NO_SUCH_KEY"}
    settings = DistillationSettings.model_validate({"teachers": [named]})
    with pytest.raises(ConfigError, match=r"teachers\.0\.api_key_env: there is no "):
        RemoteTeachers(settings, renderer())


ROW = {"hint": "carry the one", "steps": [1, 2]}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("7 + 6 =", "7 + 6 = (carry the one: 13)"),
        (
            ({"role": "system", "content": "Add."}, {"role": "user", "content": "7 + 6 ="}),
            (
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "7 + 6 = (carry the one: 13)"},
            ),
        ),
    ],
)
def test_a_template_makes_what_teachers_read_of_the_row(content: Any, shown: Any):
    template = "{{ prompt }} ({{ hint }}: {{ answer }})"
    assert for_teachers(template, Prompt(content, "13", ROW)).content == shown


def test_without_an_expected_answer_that_of_the_row_is_shown_or_the_group_fails():
    """An empty hint would teach that there is none."""
    row = {**ROW, "answer": "14"}
    for answer, shown in (("13", "7: 13"), ("", "7: 14")):
        prompt = Prompt("7", answer, row)
        assert for_teachers("{{ prompt }}: {{ answer }}", prompt).content == shown
    with pytest.raises(RolloutError, match=r"distillation\.template: 'answer' is undefined"):
        for_teachers("{{ prompt }}: {{ answer }}", Prompt("7", "", ROW))


@pytest.mark.parametrize(
    ("template", "content", "sentence"),
    [
        ("{{ hnit }}", "7", "distillation.template: 'hnit' is undefined"),
        ("{{ hint", "7", "distillation.template: unexpected end of template"),
        ("{{ '{}{}'.format(1) }}", "7", "distillation.template: IndexError"),
        ("{{ '{a}'.format(1) }}", "7", "distillation.template: KeyError"),
        ("{{ prompt.encode('x') }}", "7", "distillation.template: LookupError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "7", "template: RecursionError"),
        ("{{ hint }}", ({"role": "system", "content": "x"},), "has no message of the user"),
    ],
)
def test_a_template_that_cannot_be_rendered_fails_the_group(
    template: str, content: Any, sentence: str
):
    with pytest.raises(RolloutError, match=sentence):
        for_teachers(template, Prompt(content, "13", ROW))
