"""Bare vLLM: its own `generate`, with the arguments of our engine, on the same requests.

Both are asked for the log-probabilities of the sampled tokens, and to end at the length alone.
"""

from collections.abc import Sequence
from dataclasses import asdict

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs

from actors.engines.model import ModelFacts
from actors.engines.vllm.arguments import engine_arguments
from streamrl.config import RunConfig


class BareVllm:
    def __init__(self, config: RunConfig) -> None:
        given = asdict(engine_arguments(config, ModelFacts.of(config.model), seed=0))
        plain = asdict(AsyncEngineArgs(model=config.model.path))
        ours = {name: value for name, value in given.items() if value != plain[name]}
        self._llm = LLM(model=config.model.path, **ours)

    def __enter__(self) -> "BareVllm":
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def answer(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        params = [SamplingParams(max_tokens=int(n), ignore_eos=True, logprobs=0) for n in lengths]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = self._llm.generate(requests, params, use_tqdm=False)
        assert sum(len(answer.outputs[0].token_ids) for answer in answers) == sum(lengths)
