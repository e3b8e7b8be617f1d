"""From a run's configuration to SGLang's command line, and from our request to SGLang's.

Invariant: `generator.engine_kwargs` overrides every argument but those that correctness needs.

`sets_of`: what SGLang reports of the tokens that it did not sample. Its sampling mask has the ids
alone, and its top log-probabilities are those before truncation: a token and its candidates have
the same difference between the two distributions.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.engines.candidates import candidates, keeps_mask, top_of
from actors.engines.served.process import has_gpu
from actors.engines.served.server import ServedRequest
from actors.engines.sglang.messages import GenerateMetaInfo, GenerateReqInput, SglangSampling
from streamrl.config import RunConfig
from streamrl.config.generator import SGLANG_OURS
from streamrl.errors import RolloutError
from streamrl.placement.hosts import visible_alone
from streamrl.types import SamplingParams, TokenSets, TopLogprobs


def is_truncated(request: ServedRequest) -> bool:
    """Whether top-k or top-p excludes candidates; greedy sampling reports the full distribution."""
    sampling = request.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def sets_of(
    meta: GenerateMetaInfo, request: ServedRequest, num_tokens: int
) -> tuple[TokenSets | None, TopLogprobs | None]:
    """The mask and the likeliest tokens of the first `num_tokens`, each if it was asked for.

    Raises:
        RolloutError: they are not in the answer.
    """
    sampling = request.sampling
    masks = (meta.output_token_sampling_mask or [])[:num_tokens]
    found = (meta.output_top_logprobs or [])[:num_tokens]
    _require(masks, "sampling mask", num_tokens, is_asked=is_truncated(request))
    _require(found, "top log-probabilities", num_tokens, is_asked=sampling.num_top_logprobs > 0)
    mask = None
    if keeps_mask(sampling):
        mask = TokenSets.of([candidates(ids, [0.0] * len(ids))[0] for ids in masks])
    if not sampling.num_top_logprobs:
        return mask, None
    return mask, _top(meta, sampling, masks if is_truncated(request) else None, num_tokens)


def _top(
    meta: GenerateMetaInfo, sampling: SamplingParams, masks: list[list[int]] | None, num_tokens: int
) -> TopLogprobs:
    each = []
    for i, entries in enumerate((meta.output_top_logprobs or [])[:num_tokens]):
        rise, kept = 0.0, None
        if masks is not None and meta.output_token_sampling_logprobs is not None:
            plain = meta.output_token_logprobs[i][0]
            rise = meta.output_token_sampling_logprobs[i] - (math.nan if plain is None else plain)
            kept = frozenset(masks[i])
        pairs = [(e[1], e[0]) for e in entries or [] if kept is None or e[1] in kept]
        logprobs = [math.nan if logprob is None else logprob + rise for _, logprob in pairs]
        if not all(map(math.isfinite, logprobs)):
            raise RolloutError("the answer is inconsistent: a log-probability is not finite")
        each.append(candidates([token_id for token_id, _ in pairs], logprobs))
    return top_of(each, sampling.num_top_logprobs)


def _require(found: Sequence[object], name: str, num_tokens: int, *, is_asked: bool) -> None:
    if is_asked and len(found) != num_tokens:
        raise RolloutError(f"the answer has no {name} for {num_tokens - len(found)} of its tokens")


# SGLang leaves two positions of its context unused, and takes no prompt within six of its end.
NUM_RESERVED = 6
# With a sampling mask, which holds the candidates of each token (--sampling-mask-max-tokens).
MASK_TOKENS = 4096


def launch_environment(config: RunConfig) -> dict[str, str]:
    """What the process of `launch_command` needs beside this one's environment."""
    num_threads = config.generator.num_threads
    threads = {"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}
    if not has_gpu():
        return {**threads, "SGLANG_USE_CPU_ENGINE": "1"}
    return {**threads, **visible_alone(config.generator.device, os.environ)}


def launch_command(config: RunConfig, *, host: str, port: int, seed: int) -> list[str]:
    """The command that starts the server of a run's configuration."""
    generator = config.generator
    settings = generator.sglang.model_dump(exclude=set(SGLANG_OURS))
    given = {name: value for name, value in settings.items() if value is not None}
    arguments = {
        "model_path": config.model.path,
        "host": host,
        "port": port,
        "random_seed": seed,
        "dtype": generator.dtype,
        "max_running_requests": generator.max_num_seqs,
        "context_length": config.max_model_len + NUM_RESERVED,
        "trust_remote_code": config.model.trust_remote_code,
        "enable_metrics": True,
        # Only SGLang's minimum length needs a tokenizer.
        "skip_tokenizer_init": generator.min_new_tokens == 0,
        **({} if has_gpu() else _on_cpu(generator.max_num_seqs, config.max_model_len)),
        **({"enable_return_routed_experts": True} if config.algorithm.records_experts else {}),
        **({"enable_fp32_lm_head": True} if generator.lm_head_dtype else {}),
        **({"disable_overlap_schedule": True} if generator.sglang.keeps_old_kv else {}),
        **given,
        **generator.engine_kwargs,
    }
    return [sys.executable, "-m", "sglang.launch_server", *flags(arguments)]


def _on_cpu(max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    """SGLang's kernels for a plain CPU, a KV cache for the requests that run at a time (by default
    it is half of the machine's memory), and no core for a server that waits: by default it polls.
    """
    num_tokens = max_num_seqs * (max_model_len + NUM_RESERVED)
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "max_total_tokens": num_tokens,
        "sleep_on_idle": True,
    }


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """The arguments as flags: true is a bare flag, false no flag, a list a flag with many values.

    >>> list(flags({"tp_size": 2, "disable_cuda_graph": True, "enable_metrics": False}))
    ['--tp-size', '2', '--disable-cuda-graph']
    """
    for name, value in arguments.items():
        if value is False:
            continue
        yield "--" + name.replace("_", "-")
        if isinstance(value, list | tuple):
            yield from map(str, value)
        elif value is not True:
            yield str(value)


def wire_request(request: ServedRequest, seed: int) -> GenerateReqInput:
    """SGLang's record of the request. `seed` is used if the request has none.

    SGLang reports no log-probabilities of a distribution that top-p alone truncates, so top-k goes
    with it. It can ignore all stops, but not the end-of-sequence tokens alone: in that case
    `actors.engines.sglang.server` cuts the answer at the first stop.
    """
    sampling = request.sampling
    return GenerateReqInput(
        rid=request.id,
        input_ids=list(request.prompt_token_ids),
        sampling_params=SglangSampling(
            max_new_tokens=request.max_new_tokens,
            min_new_tokens=request.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or (MASK_TOKENS if is_truncated(request) else -1),
            stop_token_ids=sorted(request.stops),
            ignore_eos=sampling.ignore_eos,
            sampling_seed=seed if sampling.seed is None else sampling.seed,
        ),
        cache_salt=request.cache_salt,
        return_routed_experts=math.prod(request.expert_shape) > 0,
        return_logprob=True,
        return_sampling_mask=is_truncated(request),
        top_logprobs_num=sampling.num_top_logprobs or None,
    )
