"""The bodies of vLLM's route for tokens in, tokens out: the fields that we set or read.

Invariant: every class and field has vLLM's own name; `tests/vllm/test_served_messages.py` compares
them with vLLM's classes.
"""

from typing import Annotated

from msgspec import Meta, Struct

from actors.engines.candidates import candidates, num_asked, sets_of
from actors.engines.experts import from_npy, recorded
from actors.engines.served.server import (
    Labels,
    ServedRequest,
    TokenId,
    VersionSpan,
    completion,
    versions_of,
)
from streamrl.types import Completion


class VllmSampling(Struct, frozen=True, kw_only=True):
    """The fields of vLLM's class of this name that we set."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    seed: int | None
    # End-of-sequence tokens are among the stops: without a tokenizer vLLM knows none.
    ignore_eos: bool = True
    logprobs: int = 0
    detokenize: bool = False


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
    """Of a sampled token, which is the first of `top_logprobs`."""

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


class WeightInfo(Struct, frozen=True):
    """The answer to /weight_info."""

    weight_version: str


class WorldSize(Struct, frozen=True):
    """The answer to /get_world_size."""

    world_size: int


def wire_request(request: ServedRequest) -> GenerateRequest:
    sampling = request.sampling
    return GenerateRequest(
        request_id=request.id,
        token_ids=list(request.prompt_token_ids),
        sampling_params=VllmSampling(
            max_tokens=request.max_new_tokens,
            min_tokens=request.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sorted(request.stops),
            seed=sampling.seed,
            logprobs=num_asked(sampling),
        ),
        cache_salt=request.cache_salt,
    )


def completion_of(
    choice: GenerateTokensChoice, labels: Labels, request: ServedRequest
) -> Completion:
    sampled, mask, top = choice.logprobs.content, None, None
    if num_asked(request.sampling):
        each = [
            candidates([c.token_id for c in found], [c.logprob for c in found])
            for found in (token.top_logprobs for token in sampled)
        ]
        mask, top = sets_of(each, request.sampling)
    experts = None
    if request.sampling.keep_routed_experts:
        rows = None if choice.routed_experts is None else from_npy(choice.routed_experts)
        experts = recorded(
            rows,
            request.prompt_token_ids,
            choice.token_ids,
            "vLLM",
            is_aborted=choice.finish_reason == "abort",
        )
    return completion(
        choice.token_ids,
        [token.logprob for token in sampled],
        versions_of(choice.weight_versions, len(choice.token_ids), labels),
        choice.finish_reason,
        sampling_mask=mask,
        top_logprobs=top,
        routed_experts=experts,
    )
