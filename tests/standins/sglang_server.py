"""Stands in for `sglang.launch_server` where there is no GPU: its routes, around a tiny model.

Conforms to SGLang 0.5.23 in what StreamRL uses, broadcast included; its requests and answers follow
`sglang/srt/entrypoints/http_server.py` and the scheduler of that version. It has SGLang's
peculiarities: ignore_eos ignores stop tokens, seeds have no effect without deterministic inference,
log-probabilities are without truncation unless a sampling mask is requested, weights can only be
updated between begin and end, a cache cannot be flushed under running requests, requests are
aborted by the prefix of their id, and the end of the context is not used.
"""

import argparse
import asyncio
import os
import signal
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec import structs
from transformers import AutoModelForCausalLM

from streamrl.interfaces import CompletionHandle
from streamrl.types import Completion, FinishReason, SamplingParams, TokenSets
from tests.standins.http_server import serve
from tests.standins.sglang_engine import StandInEngine, is_retracted, joined

Answer = tuple[int, Any]
_SAMPLING = {"max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k"}
_SAMPLING |= {"stop_token_ids", "ignore_eos", "sampling_seed"}


def _each(column: Any, sets: TokenSets) -> list[Any]:
    return np.split(column, np.cumsum(sets.counts)[:-1])


class StandIn:
    """One server; a handler per route, named after it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self._engine = StandInEngine(
            self._load(arguments.model_path),
            eos_token_ids=frozenset(),
            max_num_seqs=arguments.max_running_requests,
            max_model_len=arguments.context_length,
            seed=arguments.random_seed,
        )
        self._asked: dict[str, asyncio.Event] = {}
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._has_session = False

    def _load(self, path: str) -> Any:
        dtype = getattr(torch, self.arguments.dtype)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    async def health(self, _: Any) -> Answer:
        return (503, "") if self._engine.is_paused else (200, "")

    async def model_info(self, _: Any) -> Answer:
        path, label = self.arguments.model_path, self._engine.labels[-1]
        return 200, {"model_path": path, "weight_version": label}

    async def server_info(self, _: Any) -> Answer:
        return 200, vars(self.arguments)

    async def v1_models(self, _: Any) -> Answer:
        return 200, {"data": [{"id": "model", "max_model_len": self.arguments.context_length}]}

    async def metrics(self, _: Any) -> Answer:
        read = self._engine.gauges()
        return 200, (
            "# TYPE sglang:num_running_reqs gauge\n"
            f'sglang:num_running_reqs{{tp_rank="0"}} {read["num_active"]}\n'
            f'sglang:num_queue_reqs{{tp_rank="0"}} {read["num_waiting"]}\n'
            f'sglang:realtime_tokens_total{{mode="decode"}} {read["num_tokens"]}\n'
            'sglang:realtime_tokens_total{mode="prefill_compute"} 123456.0\n'
        )

    async def generate(self, body: dict[str, Any]) -> Answer:
        rid, prompt = body["rid"], body["input_ids"]
        has_mask = body.get("return_sampling_mask", False)
        sampling = structs.replace(
            self._sampling(body["sampling_params"]),
            keep_sampling_mask=has_mask,
            num_top_logprobs=body.get("top_logprobs_num", 0),
        )
        length = self.arguments.context_length
        if len(prompt) + sampling.max_new_tokens > length or len(prompt) >= length - 6:
            raise ValueError("Requested token count exceeds the model's maximum context length")
        room = min(sampling.max_new_tokens, length - 2 - len(prompt))
        sampling = structs.replace(sampling, max_new_tokens=room)
        aborted = self._asked[rid] = asyncio.Event()
        try:
            await self._unpaused.wait()
            done = await self._complete(prompt, sampling, aborted)
        finally:
            del self._asked[rid]
        is_cut = sampling.top_k or sampling.top_p < 1
        meta = {"id": rid} | self._meta(done, has_mask=has_mask, is_cut=bool(is_cut))
        if (mask := done.sampling_mask) is not None:
            ids = _each(mask.token_ids, mask)
            meta |= {"output_token_sampling_mask": [one.tolist() for one in ids]}
        if (top := done.top_logprobs) is not None and not is_cut:
            pairs = zip(_each(top.logprobs, top), _each(top.token_ids, top), strict=True)
            entries = [
                [[float(p), int(t), None] for p, t in zip(*pair, strict=True)] for pair in pairs
            ]
            meta |= {"output_top_logprobs": entries}
        return 200, {"text": "", "output_ids": done.token_ids.tolist(), "meta_info": meta}

    def _sampling(self, given: dict[str, Any]) -> SamplingParams:
        if unknown := given.keys() - _SAMPLING:
            raise ValueError(f"unknown field `{min(unknown)}`")
        if given["top_k"] == 0 or given["top_k"] < -1:
            raise ValueError("top_k must be -1 (disable) or at least 1")
        is_deterministic = self.arguments.enable_deterministic_inference
        return SamplingParams(
            max_new_tokens=given["max_new_tokens"],
            min_new_tokens=given["min_new_tokens"],
            temperature=given["temperature"],
            top_p=given["top_p"],
            top_k=max(given["top_k"], 0),
            stop_token_ids=() if given["ignore_eos"] else tuple(given["stop_token_ids"]),
            ignore_eos=given["ignore_eos"],
            seed=given["sampling_seed"] if is_deterministic else None,
        )

    async def _complete(
        self, prompt: list[int], sampling: SamplingParams, aborted: asyncio.Event
    ) -> Completion:
        """Waits for the engine, as often as it takes the request back, or for the abort, which
        leaves what was sampled."""
        done: Completion | None = None
        while True:
            read = [*prompt, *(done.token_ids.tolist() if done else [])]
            left = sampling.max_new_tokens - (len(read) - len(prompt))
            fewest = max(0, sampling.min_new_tokens - (len(read) - len(prompt)))
            rest = structs.replace(sampling, max_new_tokens=left, min_new_tokens=fewest)
            future = self._engine.submit(read, rest, CompletionHandle(aborted))
            done = joined(done, await future)
            if not is_retracted(done):
                return done

    def _meta(self, done: Completion, *, has_mask: bool, is_cut: bool) -> dict[str, Any]:
        ids, logprobs = done.token_ids.tolist(), done.logprobs.tolist()
        labels = [self._engine.labels[i] for i in done.policy_versions.tolist()]
        labels = labels or self._engine.labels[-1:]
        starts = [i for i in range(len(labels)) if i == 0 or labels[i] != labels[i - 1]]
        # Before truncation they would be others; the engine inside knows those after it only.
        plain = [None] * len(ids) if is_cut else logprobs
        meta = {
            "finish_reason": _finish_reason(done),
            "completion_tokens": len(ids),
            "output_token_logprobs": [[p, t, None] for p, t in zip(plain, ids, strict=True)],
            "weight_version": labels[-1],
            "weight_versions": [
                {"version": labels[start], "start": start, "end": end}
                for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)
            ],
        }
        return meta | ({"output_token_sampling_logprobs": logprobs} if has_mask else {})

    async def abort_request(self, body: dict[str, Any]) -> Answer:
        for rid in [rid for rid in self._asked if rid.startswith(body["rid"])]:
            self._asked[rid].set()
        return 200, ""

    async def pause_generation(self, body: dict[str, Any]) -> Answer:
        self._unpaused.clear()
        if body["mode"] == "abort":
            for aborted in self._asked.values():
                aborted.set()
            while self._engine.has_requests:
                await asyncio.sleep(0.001)
        await self._engine.pause(retract=body["mode"] == "retract")
        return 200, {"status": "ok"}

    async def continue_generation(self, body: dict[str, Any]) -> Answer:
        self._engine.resume()
        self._unpaused.set()
        return 200, {"status": "ok"}

    async def init_weights_update_group(self, body: dict[str, Any]) -> Answer:
        name = body["group_name"]
        self._groups[name] = await asyncio.to_thread(
            _join,
            f"tcp://{body['master_address']}:{body['master_port']}",
            name,
            body["rank_offset"],
            body["world_size"],
            body["backend"],
        )
        return 200, {"success": True, "message": ""}

    async def destroy_weights_update_group(self, body: dict[str, Any]) -> Answer:
        dist.destroy_process_group(self._groups.pop(body["group_name"]))
        return 200, {"success": True, "message": ""}

    async def begin_weight_update(self, body: dict[str, Any]) -> Answer:
        if self._has_session:
            raise ValueError("a weight-update session is already open")
        self._has_session = True
        return 200, {"success": True, "message": ""}

    async def end_weight_update(self, body: dict[str, Any]) -> Answer:
        if not self._has_session:
            raise ValueError("no weight-update session is open")
        self._has_session = False
        return 200, {"success": True, "message": ""}

    async def update_weights_from_distributed(self, body: dict[str, Any]) -> Answer:
        if not self._has_session or not self._engine.is_paused:
            raise ValueError("update_weights_from_distributed must run between begin and end")
        if body.get("load_format") != "flattened_bucket":
            raise ValueError("only flattened_bucket stands in")
        group = self._groups[body["group_name"]]
        specs = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
        sizes = [prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in specs]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        await asyncio.to_thread(dist.broadcast, flat, 0, group)
        self._engine.put(
            (name, part.view(getattr(torch, dtype)).view(shape))
            for (name, dtype, shape), part in zip(specs, flat.split(sizes), strict=True)
        )
        if body.get("weight_version"):
            self._engine.label(body["weight_version"])
        if body.get("flush_cache", True) and self._engine.has_running:
            raise ValueError("Weights were updated, but the cache was not flushed")
        return 200, {"success": True, "message": ""}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> Answer:
        self._engine.put(self._load(body["model_path"]).named_parameters())
        return 200, {"success": True, "message": ""}

    async def update_weight_version(self, body: dict[str, Any]) -> Answer:
        self._engine.label(body["new_version"])
        return 200, {"success": True, "new_version": body["new_version"]}

    async def run(self) -> None:
        """Until SIGTERM."""
        routes = [name for name in vars(StandIn) if not name.startswith("_") and name != "run"]
        handlers = {f"/{name.replace('v1_', 'v1/')}": getattr(self, name) for name in routes}
        server = await serve(handlers, self.arguments.host, self.arguments.port)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        async with server:
            await ended.wait()
        await self._engine.end()


def _finish_reason(done: Completion) -> dict[str, str]:
    if done.finish_reason is not FinishReason.DEADLINE:
        return {"type": str(done.finish_reason)}
    message = "Aborted" if len(done.token_ids) else "Abort in waiting queue"
    return {"type": "abort", "message": message}


def _join(address: str, name: str, rank: int, world_size: int, backend: str) -> Any:
    """A group as SGLang's `init_custom_process_group` forms it, by the same calls of torch."""
    c10d = dist.distributed_c10d
    timeout = c10d.default_pg_timeout
    store, rank, world_size = next(c10d.rendezvous(address, rank, world_size, timeout=timeout))
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    for name, default in (("port", 30000), ("tp-size", 1), ("random-seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--max-running-requests", type=int, default=4)
    parser.add_argument("--context-length", type=int, default=4006)
    parser.add_argument("--dtype", default="float32")
    for name in ("enable-metrics", "skip-tokenizer-init", "enable-deterministic-inference"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


async def _main() -> None:
    await StandIn(_parsed()).run()
    # A thread may be waiting half an hour for a group that nobody forms any more.
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_main())
