"""The HF engine: requests that are stopped, rows that move, and a thread in a step without end."""

import asyncio
import threading
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from actors.engines.hf import engine as hf
from actors.engines.hf.batch import HfRequest, RunningBatch
from actors.engines.hf.cache import Compaction
from actors.episode_record import joined
from streamrl.config import RunConfig
from streamrl.errors import ConfigError, RolloutError
from streamrl.types import FinishReason, SamplingParams
from tests.engines import update_to
from tests.tiny_model import EOS, VOCAB_SIZE, make_llama, save_llama

DEADLINE_S = 120.0


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"max_new_tokens": 9}, FinishReason.DEADLINE),
        ({"max_new_tokens": 1}, FinishReason.LENGTH),
        ({"max_new_tokens": 9, "stop_token_ids": tuple(range(VOCAB_SIZE))}, FinishReason.STOP),
    ],
)
def test_a_request_stopped_at_its_end_has_ended_by_itself(sampling, reason):
    batch = RunningBatch(
        make_llama(0), num_slots=1, max_model_len=16, eos_token_ids=frozenset(), seed=0
    )
    request = HfRequest((5,), SamplingParams(**sampling))
    request.handle.stop.set()
    batch.join([request], 3)
    ((left, completion),) = batch.leave()
    assert (left, request.handle.num_tokens, len(batch)) == (request, 1, 0)
    assert (completion.finish_reason, completion.policy_versions.tolist()) == (reason, [3])


def test_what_is_told_of_a_completion_is_its_beginning_and_another_engine_goes_on_with_it():
    whole = SamplingParams(max_new_tokens=8, temperature=0.0, num_top_logprobs=2)
    batch, again = (
        RunningBatch(
            make_llama(0), num_slots=2, max_model_len=32, eos_token_ids=frozenset(), seed=0
        )
        for _ in range(2)
    )
    request = HfRequest((5, 6), whole)
    batch.join([request, HfRequest((7,), whole)], 3)
    told = []
    while len(batch):
        request.handle.is_asked = True
        left = batch.leave()
        told.append(request.handle.sampled)
        if len(batch):
            batch.step(3)
    ((_, completion),) = [pair for pair in left if pair[0] is request]
    assert [len(part.token_ids) for part in told] == [1, 2, 3, 4, 5, 6, 7, 7]
    for part in told[:-1]:
        count = len(part.token_ids)
        assert part.finish_reason is FinishReason.ABORT
        assert part.token_ids.tolist() == completion.token_ids[:count].tolist()
        rest = SamplingParams(max_new_tokens=8 - count, temperature=0.0, num_top_logprobs=2)
        again.join([HfRequest((5, 6, *part.token_ids.tolist()), rest)], 4)
        while not (left := again.leave()):
            again.step(4)
        on = joined(part, left[0][1])
        assert on.token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(on.logprobs, completion.logprobs, atol=1e-4)
        assert on.policy_versions.tolist() == [3] * count + [4] * (8 - count)
        assert on.top_logprobs.token_ids.tolist() == completion.top_logprobs.token_ids.tolist()
        assert on.finish_reason is FinishReason.LENGTH


@given(st.lists(st.booleans(), max_size=20))
def test_rows_that_stay_are_the_first_ones_and_as_few_as_possible_move(leaves):
    moves, rows = Compaction.of(np.array(leaves, np.bool_)), list(range(len(leaves)))
    moves.apply(rows)
    stay = [row for row, leaves_now in enumerate(leaves) if not leaves_now]
    assert sorted(rows) == stay
    assert [row for row in stay if row < moves.size] == [
        row for place, row in enumerate(rows) if place == row
    ]
    assert len(moves.sources) == sum(row >= moves.size for row in stay)


def test_a_folder_without_a_model_is_named(tmp_path):
    settings = {"model": {"path": str(tmp_path)}, "data": {"source": "addition"}}
    with pytest.raises(ConfigError, match=f"^model.path: no model at '{tmp_path}'"):
        hf.HfEngine.from_config(RunConfig.model_validate(settings), seed=0)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"no_such": 1},
            r"model\.path '.*' with generator\.engine_kwargs \(no_such\): .*'no_such'",
        ),
        (
            {"attn_implementation": "flash"},
            r"model\.path .* \(attn_implementation\): .*not support",
        ),
    ],
)
def test_keywords_that_the_model_does_not_take_are_named(tmp_path, given, sentence):
    save_llama(tmp_path)
    generator = {"engine": "hf", "engine_kwargs": given}
    settings = {"model": {"path": str(tmp_path)}, "data": {"source": "addition"}}
    config = RunConfig.model_validate({**settings, "generator": generator})
    with pytest.raises(ConfigError, match=rf"^{sentence}"):
        hf.HfEngine.from_config(config, seed=0)


async def test_close_waits_a_while_for_a_step_and_then_leaves_it_alone(monkeypatch, caplog):
    model = make_llama(0)
    forward, entered, may_end = model.forward, threading.Event(), threading.Event()

    def hanging_forward(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        may_end.wait()
        return forward(*args, **kwargs)

    monkeypatch.setattr(hf, "CLOSE_S", 0.05)
    engine = hf.HfEngine(model, eos_token_ids=frozenset([EOS]), max_num_seqs=1, max_model_len=16)
    monkeypatch.setattr(model, "forward", hanging_forward)
    waiting = asyncio.create_task(engine.generate([5], SamplingParams(max_new_tokens=4)))
    await asyncio.to_thread(entered.wait, DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        await engine.close()
    assert "left alone" in caplog.text
    may_end.set()
    with pytest.raises(RolloutError, match="closed"):
        await waiting


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_swap_that_fails_ends_the_load_that_waits_for_it(monkeypatch, tmp_path):
    def no_memory() -> None:
        raise MemoryError("of the swap")

    engine = hf.HfEngine(make_llama(0), eos_token_ids=frozenset(), max_num_seqs=1, max_model_len=16)
    monkeypatch.setattr(engine._weights, "swap", no_memory)
    update = update_to(make_llama(1), 1, tmp_path / "1.safetensors")
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(MemoryError, match="of the swap"):
            await engine.load_weights(update)
        with pytest.raises(RuntimeError, match="thread has ended with an error"):
            await engine.generate([5], SamplingParams(max_new_tokens=1))
        await engine.close()
