"""Makes vLLM's arguments from a run's configuration, and vLLM's sampling record from ours.

Invariant: `generator.engine_kwargs` overrides every argument except those that correctness needs:
token ids in and out, log-probabilities of the distribution sampled from, our weight transfer.
"""

import os
from typing import Any

from msgspec import structs
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from actors.engines.completions import most_asked
from actors.engines.model import ModelFacts
from actors.engines.vllm.cpu import require_servable
from actors.engines.vllm.messages import VllmSampling
from actors.engines.vllm.plugin import BACKEND, register
from streamrl.config import RunConfig
from streamrl.config.generator import VllmSettings
from streamrl.errors import ConfigError
from streamrl.types import SamplingParams

_CPU_KV_CACHE_BYTES = 512 * 2**20
# Each report wakes a task of the event loop.
_REPORT_EVERY_TOKENS = 32
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
# Under its short name `uni`, vLLM replaces it on CPUs by one that must bind threads to cores.
IN_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_FIXED: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "disable_log_stats": False,
}


def engine_arguments(config: RunConfig, facts: ModelFacts, *, seed: int) -> AsyncEngineArgs:
    """vLLM's arguments for the engine that a run's configuration describes.

    Raises:
        ConfigError: vLLM does not accept an argument, or cannot serve the model on this CPU.
    """
    register()
    chosen = {**_typed(config), **config.generator.engine_kwargs}
    if config.generator.lm_head_dtype:
        own = chosen.get("hf_overrides") or {}
        chosen["hf_overrides"] = {"head_dtype": config.generator.lm_head_dtype, **own}
    if current_platform.is_cpu():
        require_servable(config, facts)
        chosen = {"kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES, "enforce_eager": True} | chosen
        _prepare_cpu(config.generator.num_threads, chosen["enforce_eager"])
        if chosen["tensor_parallel_size"] == 1 and os.environ[_BIND] == "nobind":
            # In separate processes, scheduler and worker spin while they wait for each other's
            # step; on a machine with few cores nothing else would run for seconds.
            chosen = {"distributed_executor_backend": IN_ONE_PROCESS} | chosen
    else:
        # As `vllm serve` does: if something in this process, such as a reward's module, has asked
        # torch for a GPU, a forked process gets none, and vLLM does not notice every such case.
        os.environ.setdefault(_START_METHOD, "spawn")
    try:
        return AsyncEngineArgs(
            **chosen,
            **_FIXED,
            skip_tokenizer_init=facts.placeholders is None,
            seed=seed,
            enable_log_requests=False,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )
    except TypeError as error:
        raise ConfigError(f"generator.engine_kwargs: {error}") from error


def vllm_sampling(sampling: SamplingParams, stops: frozenset[int]) -> VllmSamplingParams:
    """vLLM's record of the same request; it reports new tokens now and then, not decoded to text.

    With CUMULATIVE (all tokens so far in each report), vLLM 0.32 would report at every token,
    whatever `stream_interval` says.
    """
    return VllmSamplingParams(
        **structs.asdict(VllmSampling.of(sampling, stops)),
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=_REPORT_EVERY_TOKENS,
        # No clone is needed: the record belongs to one request.
        skip_clone=True,
    )


def _typed(config: RunConfig) -> dict[str, Any]:
    """Arguments from the typed settings; vLLM chooses those that are unset."""
    generator = config.generator
    settings = generator.vllm.model_dump(exclude=set(VllmSettings.ours))
    given = {name: value for name, value in settings.items() if value is not None}
    return {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": generator.dtype,
        "max_num_seqs": generator.max_num_seqs,
        "max_model_len": config.max_model_len,
        **({"max_logprobs": num} if (num := most_asked(config)) else {}),
        **({"enable_return_routed_experts": True} if config.algorithm.records_experts else {}),
        **given,
    }


def _prepare_cpu(num_threads: int, is_eager: bool) -> None:
    """Set environment variables that vLLM's workers read when they start. Binding threads to cores
    would bind all generators of a machine to the same cores."""
    os.environ.setdefault(_BIND, "nobind")
    if is_eager:
        # Otherwise vLLM compiles its samplers' small functions at the first request, for half a
        # minute.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if num_threads:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
