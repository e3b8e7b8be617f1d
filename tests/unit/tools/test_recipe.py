"""`configs/recipes/calculator`: what the model reads and samples, token by token."""

from pathlib import Path

import numpy as np
import pytest

from actors.environments import environment_maker, require_rendering
from actors.episodes.episode import EpisodeRun
from actors.make_model import make_tokenizer
from actors.prompts import open_stream
from actors.rendering.renderer import ChatRenderer
from actors.tools.toolset import Toolset, make_sources
from streamrl.config import RunConfig, load_config
from streamrl.interfaces import EnvironmentContext
from streamrl.types import Completion, FinishReason, SamplingParams
from tests.documents import ROOT

RECIPE = ROOT / "configs" / "recipes" / "calculator"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(RECIPE)
    return load_config(Path("config.yaml"), environment={}).config


async def test_an_episode_is_the_call_the_result_and_the_answer(config: RunConfig) -> None:
    assert config.model.recipe is not None
    tokenizer = make_tokenizer(config.model.recipe.alphabet)
    renderer = ChatRenderer(tokenizer, config.data)
    require_rendering(config.entries, renderer)
    prompt = open_stream(config, renderer)[0]
    product = str(prompt.content).rstrip("?")
    texts = [f"[{product}]</s>", f"{prompt.answer}</s>"]

    class Engine:
        async def generate(self, *_: object) -> Completion:
            ids = np.array(renderer.encode_text(texts.pop(0)), np.int32)
            zeros = np.zeros(len(ids))
            return Completion(
                token_ids=ids,
                logprobs=zeros.astype(np.float32),
                policy_versions=zeros.astype(np.int32),
                finish_reason=FinishReason.STOP,
            )

    (entry,) = config.entries
    toolset = Toolset(make_sources(config.generator))
    context = EnvironmentContext(prompt, renderer.encode(prompt), renderer)
    run = EpisodeRun(
        Engine(),  # type: ignore[arg-type]
        environment_maker(entry, toolset),  # type: ignore[arg-type]
        max_model_len=config.max_model_len,
        deadline_s=60.0,
    )
    rollout = await run.run(context, SamplingParams(max_new_tokens=10))
    (segment,) = rollout.segments
    whole = f"{product}?[{product}]</s>({prompt.answer}){prompt.answer}</s>"
    assert segment.token_ids == renderer.encode_text(whole)
    assert renderer.decode(rollout.last_response) == prompt.answer
    assert tokenizer.unk_token_id not in segment.token_ids
    assert rollout.metrics["tool/calculator/num_errors"] == 0
