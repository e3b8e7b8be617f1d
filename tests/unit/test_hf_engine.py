"""The HF engine's thread in a step that does not end."""

import asyncio
import threading
from typing import Any

import pytest

from actors.engines.hf import engine as hf
from streamrl.errors import RolloutError
from streamrl.types import SamplingParams
from tests.tiny_model import make_llama

DEADLINE_S = 30.0


async def test_close_waits_a_while_for_a_step_and_then_leaves_it_alone(monkeypatch, caplog):
    model = make_llama(0)
    forward, entered, may_end = model.forward, threading.Event(), threading.Event()

    def hanging_forward(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        may_end.wait()
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", hanging_forward)
    monkeypatch.setattr(hf, "CLOSE_S", 0.05)
    engine = hf.HfEngine(model, max_num_seqs=1, max_model_len=16)
    waiting = asyncio.create_task(engine.generate([5], SamplingParams(max_new_tokens=4)))
    await asyncio.to_thread(entered.wait, DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        await engine.close()
    assert "left alone" in caplog.text
    may_end.set()
    with pytest.raises(RolloutError, match="closed"):
        await waiting
