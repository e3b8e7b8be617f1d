"""What an agent's episode records is what the engine read and sampled, and what a learner scores.

The real engine, chat template, HTTP server and client of OpenAI; the policy is a Llama of random
weights, whose answers are text that no tokenizer would give back.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from actors.engines.hf.engine import HfEngine
from actors.episodes.episode import EpisodeRun
from actors.gateway.gateway import Gateway
from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from streamrl.config import RunConfig
from streamrl.interfaces import CompletionHandle, EnvironmentContext, Prompt
from streamrl.types import Completion, SamplingParams, Trajectory
from tests.rollouts import trajectories_of
from tests.tiny_model import make_llama

TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role[0] + ':' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<s>a:{% endif %}"
)
END_OF_TURN = 2
SAMPLING = SamplingParams(max_new_tokens=6)
AGENT = """
import asyncio
import openai

QUESTION = {"role": "user", "content": "12"}

async def play(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages, **options):
            answer = await client.chat.completions.create(model="m", messages=messages, **options)
            said = answer.choices[0].message
            return [*messages, {"role": "assistant", "content": said.content}]

        messages = [QUESTION]
        for turn in range(4):
            messages = await ask([*messages, {"role": "user", "content": str(turn)}])
        # A summary, sub-agents beside each other, two ways on from one place, and a cut answer.
        await ask([{"role": "user", "content": "321"}])
        await asyncio.gather(*(ask([{"role": "user", "content": str(n)}]) for n in range(3)))
        for n in range(2):
            await ask([*messages, {"role": "user", "content": f"9{n}"}], max_tokens=1)
    return 1.0
"""


class WatchedEngine(HfEngine):
    """Keeps what it read and sampled."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)
        self.calls: list[tuple[tuple[int, ...], Completion]] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        handle: CompletionHandle | None = None,
    ) -> Completion:
        completion = await super().generate(prompt_token_ids, sampling, handle)
        self.calls.append((tuple(prompt_token_ids), completion))
        return completion


@pytest.fixture
async def engine() -> AsyncIterator[WatchedEngine]:
    engine = WatchedEngine(
        make_llama(), eos_token_ids=frozenset([END_OF_TURN]), max_num_seqs=4, max_model_len=200
    )
    yield engine
    await engine.close()


def config(folder: Path) -> RunConfig:
    (folder / "own_agent.py").write_text(AGENT)
    (folder / "template.jinja").write_text(TEMPLATE)
    return RunConfig.model_validate(
        {
            "model": {"path": "policy"},
            "data": {
                "source": "copy",
                "reward": "environment",
                "chat_template": str(folder / "template.jinja"),
            },
            "generator": {
                "environment": "agent",
                "agent": {"function": f"{folder / 'own_agent.py'}:play"},
            },
        }
    )


async def played(settings: RunConfig, engine: WatchedEngine) -> tuple[Trajectory, ...]:
    """The trajectories of one episode."""
    renderer = ChatRenderer(make_tokenizer("0123456789usa:xyz"), settings.data)
    gateway = Gateway(settings)
    await gateway.start(renderer)
    try:
        episode = EpisodeRun(engine, lambda: gateway, max_model_len=200, deadline_s=600)
        prompt = Prompt("12", "", environment="agent")
        context = EnvironmentContext(prompt, renderer.encode(prompt), renderer)
        async with asyncio.timeout(120):
            rollout = await episode.run(context, SAMPLING)
    finally:
        await gateway.close()
    return trajectories_of(rollout, 1.0)


async def test_every_token_is_recorded_as_it_was_read_and_sampled(tmp_path, engine):
    trajectories = await played(config(tmp_path), engine)
    recorded = [t.token_ids.tolist() for t in trajectories]
    for prompt, completion in engine.calls:
        whole = [*prompt, *completion.token_ids.tolist()]
        assert any(ids[: len(whole)] == whole for ids in recorded), "a call is recorded as it was"
    assert len(engine.calls) == 10
    # Four turns and one of the two that follow them; the other; a summary; three sub-agents.
    assert len(trajectories) == 6
    assert max(len(t.turns) for t in trajectories) == 5
    sampled = sum(len(completion.token_ids) for _, completion in engine.calls)
    assert sum(t.num_response_tokens for t in trajectories) == sampled


async def test_the_logprobs_are_those_of_the_learners_forward_pass(tmp_path, engine):
    trajectories = await played(config(tmp_path), engine)
    model: LlamaForCausalLM = make_llama()
    for trajectory in trajectories:
        ids = torch.tensor(trajectory.token_ids, dtype=torch.long)[None]
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        scored = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(trajectory.response_mask)[1:]
        own = torch.from_numpy(trajectory.behavior_logprobs)[1:]
        torch.testing.assert_close(own[mask], scored[mask], atol=1e-5, rtol=1e-5)


async def test_a_transcript_would_be_tokenized_otherwise(tmp_path, engine):
    """What the prefix-exact record saves: the messages rendered again are other tokens."""
    settings = config(tmp_path)
    renderer = ChatRenderer(make_tokenizer("0123456789usa:xyz"), settings.data)
    trajectories = await played(settings, engine)
    longest = max(trajectories, key=lambda t: t.num_tokens).token_ids.tolist()
    text = renderer._tokenizer.decode(longest)
    assert list(renderer.encode_text(text)) != longest
