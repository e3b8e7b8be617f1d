"""Bodies of vLLM's routes: the fields that we set or read.

Invariant: every class and field has vLLM's own name; `tests/vllm/test_served_messages.py` compares
them with vLLM's classes. `VllmSampling` is also used for requests to a vLLM in this process.
"""

from typing import Annotated, Any, Self

from msgspec import Meta, Struct

from actors.engines.completions import num_asked
from actors.engines.served.server import TokenId, VersionSpan
from streamrl.types import SamplingParams


class VllmSampling(Struct, frozen=True, kw_only=True):
    """The fields of vLLM's `SamplingParams` that we set."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    seed: int | None
    logprobs: int
    # End-of-sequence tokens are among the stops: without a tokenizer vLLM knows none.
    ignore_eos: bool = True
    detokenize: bool = False

    @classmethod
    def of(cls, sampling: SamplingParams, stops: frozenset[int]) -> Self:
        return cls(
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sorted(stops),
            seed=sampling.seed,
            logprobs=num_asked(sampling),
        )


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """The fields of vLLM's class of this name that we set."""

    request_id: str
    token_ids: list[int]
    sampling_params: VllmSampling
    cache_salt: str


class GenerateLogProb(Struct, frozen=True):
    token_id: TokenId
    logprob: float


class GenerateLogProbsContent(Struct, frozen=True):
    """The log-probabilities at a sampled token, which is the first of `top_logprobs`."""

    logprob: float
    top_logprobs: list[GenerateLogProb] = []


class GenerateLogProbs(Struct, frozen=True):
    content: list[GenerateLogProbsContent]


class GenerateTokensChoice(Struct, frozen=True):
    token_ids: list[TokenId]
    logprobs: GenerateLogProbs
    finish_reason: str
    weight_versions: list[VersionSpan]
    routed_experts: str | None = None


class GenerateTokensResponse(Struct, frozen=True):
    choices: Annotated[list[GenerateTokensChoice], Meta(min_length=1)]


class WeightTransferUpdateRequest(Struct, frozen=True):
    update_info: dict[str, Any]


class WorldSize(Struct, frozen=True):
    world_size: int
