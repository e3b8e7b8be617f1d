"""An evaluation of more prompts than the engine has room for scores all of them."""

import asyncio
from collections.abc import Sequence

from actors.engines.requests import nothing_sampled, slot_or_stop
from actors.evaluation import greedy_groups_of
from actors.make_model import make_tokenizer
from streamrl.config import RunConfig
from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, SamplingParams
from tests.unit.test_generator import FakeEngine

DEADLINE_S = 0.5


class SlowEngine(FakeEngine):
    """Takes a fifth of the deadline for a completion, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._slots = asyncio.Semaphore(1)

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        async with slot_or_stop(self._slots, handle.stop) as has_slot:
            if not has_slot:
                return nothing_sampled()
            await asyncio.sleep(DEADLINE_S / 5)
            return await super().generate(prompt, sampling, handle)


async def test_prompts_that_wait_for_the_engine_have_their_whole_deadline(tmp_path):
    make_tokenizer("0123456789+=").save_pretrained(tmp_path)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "data": {"source": "addition", "num_eval_prompts": 10},
            "generator": {"max_num_seqs": 1, "group_deadline_s": DEADLINE_S},
        }
    )
    groups = await greedy_groups_of(config, SlowEngine())
    assert [group.prompt_index for group in groups] == list(range(10))
