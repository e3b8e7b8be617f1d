"""The bodies of SGLang's HTTP routes: the fields that we set or read.

Invariant: every class and field has SGLang's own name; `tests/unit/test_sglang_messages.py`
compares them with the package of the version named there.
"""

from typing import Any, Literal

from msgspec import Struct

from actors.engines.served.server import TokenId, VersionSpan

__all__ = ["VersionSpan"]


class SglangSampling(Struct, frozen=True, kw_only=True):
    """SGLang uses `sampling_seed` only with enable_deterministic_inference, and without a seed all
    siblings would then be equal."""

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    ignore_eos: bool
    sampling_seed: int


class GenerateReqInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`return_sampling_mask` asks for log-probabilities under the truncated distribution and for
    the candidates that truncation left; `return_routed_experts` asks for the experts of all tokens
    except the last."""

    rid: str
    input_ids: list[int]
    sampling_params: SglangSampling
    cache_salt: str
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None


class SglangFinishReason(Struct, frozen=True):
    type: str
    message: str | None = None


class GenerateMetaInfo(Struct, frozen=True, kw_only=True):
    """A logprob entry is [log-probability, token id, text]."""

    finish_reason: SglangFinishReason
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_token_sampling_logprobs: list[float] | None = None
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_top_logprobs: list[list[tuple[float | None, int, Any]] | None] | None = None
    weight_versions: list[VersionSpan] = []
    routed_experts: str | None = None


class GenerateResponse(Struct, frozen=True, kw_only=True):
    output_ids: list[TokenId]
    meta_info: GenerateMetaInfo


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The answer to /model_info."""

    model_path: str
    weight_version: str


class AbortReq(Struct, frozen=True, kw_only=True):
    """Aborts every request whose id begins with this one."""

    rid: str


PauseMode = Literal["abort", "retract", "in_place"]


class PauseGenerationReqInput(Struct, frozen=True):
    mode: PauseMode


class InitWeightsUpdateGroupReqInput(Struct, frozen=True, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class DestroyWeightsUpdateGroupReqInput(Struct, frozen=True, kw_only=True):
    group_name: str


class UpdateWeightsFromDistributedReqInput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One bucket: its tensors' bytes in this order, without gaps."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    group_name: str
    load_format: Literal["flattened_bucket"] | None = None
    flush_cache: bool = True
    weight_version: str | None = None


class UpdateWeightFromDiskReqInput(Struct, frozen=True, kw_only=True):
    model_path: str
    abort_all_requests: bool


class UpdateWeightVersionReqInput(Struct, frozen=True, kw_only=True):
    new_version: str
    abort_all_requests: bool
