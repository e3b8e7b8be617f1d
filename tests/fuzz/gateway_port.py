"""A generator's gateway and hostile requests, as many as one likes.

    PYTHONPATH=. python tests/fuzz/gateway_port.py --messages 1000000 [--seed 1]

Requests of all three APIs and of the task routes whose JSON is changed anywhere, and some whose
bytes are; several share a connection. They have the key of an episode that is there, and close it
at times. Beside them an agent of ours converses. What must hold: every request that is HTTP is
answered, none with an internal error; our agent is answered rightly, and memory stays. Prints one
JSON line. `tests/system/test_gateway_fuzz.py` does the same with a small budget.
"""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import psutil

from actors.gateway.gateway import Gateway
from actors.gateway.session import Session
from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from streamrl.config import RunConfig
from streamrl.errors import RolloutError
from streamrl.interfaces import CompletionHandle, EnvironmentContext, Prompt
from streamrl.types import Completion, FinishReason, SamplingParams
from tests.fuzz.gateway_requests import Connection, Target, requests
from tests.fuzz.hostile import parse

BATCH = 50
EPISODE_MESSAGES = 100
NUM_EPISODES = 16
GROWTH_BYTES = 128 * 2**20
ALPHABET = "0123456789usa:xyz<>/(){}\"', \n"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{{ t.function.parameters | tojson }}"
    "{% endfor %}{% for m in messages %}{{ m.role[0] + ':' + m.content }}"
    """{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}","""
    """ "arguments": {{ c.function.arguments | tojson }}}</tool_call>"""
    "{% endfor %}{{ m.reasoning_content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Fuzzed(msgspec.Struct):
    """What was sent, what was answered, and what the agent of ours saw beside it."""

    num_messages: int = 0
    num_answered: int = 0
    statuses: dict[int, int] = {}
    num_turns: int = 0
    seconds: float = 0.0
    rss_before_mb: int = 0
    rss_after_mb: int = 0
    latency_p50_ms: float = 0.0
    latency_max_ms: float = 0.0


class Engine:
    """Answers with the digit that the prompt's number of tokens ends with."""

    policy_version = 1

    def __init__(self, renderer: ChatRenderer) -> None:
        self._digits = [renderer.encode_text(digit)[-1] for digit in "0123456789"]

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, handle: CompletionHandle
    ) -> Completion:
        await asyncio.sleep(0)
        return Completion(
            token_ids=np.array([self._digits[len(prompt) % 10]], np.int32),
            logprobs=np.array([-1.0], np.float32),
            policy_versions=np.array([self.policy_version], np.int32),
            finish_reason=FinishReason.STOP,
        )


async def fuzz(folder: Path, num_messages: int, seed: int) -> Fuzzed:
    """Raises AssertionError where something does not hold."""
    gateway, renderer = parts(folder)
    url = await gateway.start(renderer)
    engine, counts = Engine(renderer), Fuzzed()
    playing = [asyncio.create_task(play(gateway, engine, renderer)) for _ in range(NUM_EPISODES)]
    good = asyncio.create_task(converse(url, counts))
    try:
        target = Target(url)
        source = requests(target, seed)
        statuses: Counter[int] = Counter()
        counts.rss_before_mb, start_s = _rss_mb(), time.monotonic()
        while counts.num_messages < num_messages:
            if counts.num_messages % EPISODE_MESSAGES == 0:
                await target.renew()
            batch = list(islice(source, BATCH))
            answers = await target.send(batch)
            counts.num_messages += len(batch)
            counts.num_answered += len(answers)
            for status, body in answers:
                assert status < 500, (status, body[:2000])
                statuses[status] += 1
            assert not good.done(), good.exception()
        counts.seconds = round(time.monotonic() - start_s, 1)
        counts.rss_after_mb, counts.statuses = _rss_mb(), dict(statuses)
    finally:
        for task in (good, *playing):
            task.cancel()
        await asyncio.gather(good, *playing, return_exceptions=True)
        await gateway.close()
    assert counts.num_turns > 0
    assert (counts.rss_after_mb - counts.rss_before_mb) * 2**20 < GROWTH_BYTES, counts
    return counts


async def play(gateway: Gateway, engine: Engine, renderer: ChatRenderer) -> None:
    """Episode after episode, whatever becomes of each; until cancelled."""
    prompt = Prompt("12", "3", {"id": 5}, environment="agent")
    sampling = SamplingParams(max_new_tokens=8)
    while True:
        session = Session(engine, renderer, sampling, max_model_len=4000)
        context = EnvironmentContext(prompt, (), renderer, seed=7, episode_index=1)
        with suppress(RolloutError):
            await gateway.play(session, context)


async def converse(url: str, counts: Fuzzed) -> None:
    """A conversation after the other, in episodes of its own; until cancelled."""
    latencies_s = []
    async with Connection(url) as connection:
        while True:
            status, task = await connection.ask("POST", "/sessions", {"agent": "good"})
            assert status == 200, task
            headers = {"Authorization": f"Bearer {json.loads(task)['api_key']}"}
            messages = [{"role": "user", "content": "12"}]
            for _ in range(10):
                start_s = time.monotonic()
                body = {"model": "m", "messages": messages}
                status, answer = await connection.ask("POST", "/v1/chat/completions", body, headers)
                assert status in (200, 410), answer
                if status == 410:
                    break
                latencies_s.append(time.monotonic() - start_s)
                said = json.loads(answer)
                digit = str(said["usage"]["prompt_tokens"] % 10)
                assert said["choices"][0]["message"]["content"] == digit
                messages = [*messages, said["choices"][0]["message"], messages[0]]
                counts.num_turns += 1
                await asyncio.sleep(0.02)
            await connection.ask("POST", "/sessions/x/reward", {"reward": 1.0}, headers)
            latencies_s = sorted(latencies_s)[-10_000:]
            counts.latency_p50_ms = round(1000 * latencies_s[len(latencies_s) // 2], 1)
            counts.latency_max_ms = round(1000 * latencies_s[-1], 1)


def parts(folder: Path) -> tuple[Gateway, ChatRenderer]:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    config = RunConfig.model_validate(
        {
            "model": {"path": "policy"},
            "data": {"source": "copy", "chat_template": str(template)},
            "generator": {"environment": "agent", "agent": {"silence_s": 0.5}},
        }
    )
    return Gateway(config), ChatRenderer(make_tokenizer(ALPHABET), config.data)


def _rss_mb() -> int:
    return int(psutil.Process().memory_info().rss) >> 20


def main() -> None:
    arguments = parse(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        counts = asyncio.run(fuzz(Path(folder), arguments.messages, arguments.seed))
    print(json.dumps(msgspec.to_builtins(counts, str_keys=True)))


if __name__ == "__main__":
    main()
