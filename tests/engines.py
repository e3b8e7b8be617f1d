"""Engines for the contract suite, each holding the tiny Llama of seed 0 at version 0.

vLLM takes many seconds to start, so its engines are kept and given their first weights back before
the next test, and so are servers; HF engines are made anew.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from actors.engines import make_engine
from actors.engines.served.process import ServerProcess
from actors.engines.sglang.server import launch_command
from actors.engines.vllm.server import serve_options
from streamrl.config import RunConfig
from streamrl.interfaces import Engine
from streamrl.types import Completion, FilesEndpoint, WeightUpdate
from streamrl.weights.layout import Layout, manifest_of
from streamrl.weights.transports.files import write_whole
from streamrl.weights.transports.shared_memory import SendBuffers
from tests.ports import free_port
from tests.tiny_model import EOS, make_llama, make_tokenizer

MakeEngine = Callable[..., Awaitable[Engine]]


def make_model(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    """The tiny Llama with heads that vLLM's CPU kernels take, and room for long completions."""
    return make_llama(seed, **{"head_dim": 32, "max_position_embeddings": 4096, **overrides})


@torch.no_grad()
def logprob_errors(seed: int, prompt: list[int], completion: Completion) -> np.ndarray:
    """How far what was recorded is from a forward pass of the seed's model, per token [N]."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logits = make_model(seed=seed)(ids).logits[0, len(prompt) - 1 : -1].float()
    index = torch.from_numpy(completion.token_ids).long()[:, None]
    expected = torch.log_softmax(logits, dim=-1).gather(-1, index)[:, 0].numpy()
    return np.abs(expected - completion.logprobs)


class HfEngines:
    """A new engine for each request; all are closed before the next test."""

    # Tokens that take it seconds, in which others are stopped, on a busy machine, too.
    num_long = 400
    reports_tokens = True
    has_seeds = True
    has_bfloat16 = True
    # Whether top-p counts the probabilities of all tokens, or of those that top-k has kept.
    truncates_jointly = False

    def __init__(self, folder: Path) -> None:
        self._made: list[Engine] = []

    async def make(
        self,
        model: LlamaForCausalLM | None = None,
        *,
        max_num_seqs: int = 4,
        max_model_len: int = 64,
    ) -> Engine:
        from actors.engines.hf.engine import HfEngine

        model = model or make_model()
        engine = HfEngine(
            model,
            eos_token_ids=frozenset([EOS]),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._made.append(engine)
        return engine

    async def renew(self) -> None:
        await self.close()

    async def close(self) -> None:
        for engine in self._made:
            await engine.close()
        self._made.clear()


class VllmEngines:
    """One engine for each shape, kept from test to test; the default one serves long requests."""

    num_long = 3000
    reports_tokens = True
    has_seeds = True
    has_bfloat16 = True
    truncates_jointly = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[tuple[object, ...], Engine] = {}

    async def make(
        self,
        model: LlamaForCausalLM | None = None,
        *,
        max_num_seqs: int = 4,
        max_model_len: int = 4000,
    ) -> Engine:
        model = model or make_model()
        dtype = str(model.dtype).removeprefix("torch.")
        shape = (max_num_seqs, max_model_len, dtype)
        if shape not in self._kept:
            await self._make_room(dtype)
            path = self._folder / dtype
            model.save_pretrained(path)
            self._kept[shape] = self._open(
                path, max_num_seqs=max_num_seqs, max_model_len=max_model_len, dtype=dtype
            )
        return self._kept[shape]

    async def _make_room(self, dtype: str) -> None:
        """All of them fit beside each other."""

    def _open(self, path: Path, **generator: object) -> Engine:
        return open_engine(path, "vllm", **generator)

    async def renew(self) -> None:
        for shape, engine in list(self._kept.items()):
            if engine.is_closed:
                del self._kept[shape]
            elif engine.policy_version:
                path = self._folder / "first.safetensors"
                await engine.load_weights(update_to(make_model(), 0, path))

    async def close(self) -> None:
        for engine in self._kept.values():
            await engine.close()
        self._kept.clear()


class UrlEngines(VllmEngines):
    """Engines on servers elsewhere: one server for each precision, which serves one at a time."""

    engine: str
    reports_tokens = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._servers: dict[str, tuple[str, ServerProcess]] = {}

    def command(self, path: Path, dtype: str, port: int) -> list[str]:
        raise NotImplementedError

    async def _make_room(self, dtype: str) -> None:
        for shape in [shape for shape in self._kept if shape[-1] == dtype]:
            await self._kept.pop(shape).close()

    def _open(self, path: Path, **generator: object) -> Engine:
        dtype = str(generator["dtype"])
        if dtype not in self._servers:
            port = free_port()
            words = self.command(path, dtype, port)
            process = ServerProcess(words, self._folder / f"{dtype}.log", ENVIRONMENT)
            self._servers[dtype] = (f"http://127.0.0.1:{port}", process)
        url, process = self._servers[dtype]
        process.require_alive()
        return open_engine(path, self.engine, url, **generator)

    async def close(self) -> None:
        await super().close()
        for _, process in self._servers.values():
            process.close()


class SglangEngines(UrlEngines):
    """On a real SGLang that another process serves."""

    engine = "sglang"
    num_long = 1500
    # Only its batch-invariant kernels, which need a GPU, apply a request's seed.
    has_seeds = False
    # A second server of its own, by kernels that no GPU has.
    has_bfloat16 = False
    truncates_jointly = True

    def command(self, path: Path, dtype: str, port: int) -> list[str]:
        make_tokenizer().save_pretrained(path)
        # With a minimum of tokens the server has a tokenizer.
        config = run_config(path, dtype=dtype, max_model_len=4000, max_num_seqs=4, min_new_tokens=1)
        return launch_command(config, host="127.0.0.1", port=port, seed=0)


class VllmUrlEngines(UrlEngines):
    """On a real vLLM that another process serves."""

    engine = "vllm"

    def command(self, path: Path, dtype: str, port: int) -> list[str]:
        from actors.engines.vllm.arguments import IN_ONE_PROCESS

        # `vllm serve` as the wheel for CPUs has it: its command line looks for another name.
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
        url = {"url": "http://127.0.0.1"}
        config = run_config(path, dtype=dtype, max_model_len=4000, max_num_seqs=4, vllm=url)
        words = serve_options(config)
        on_cpu = ["--enforce-eager", "--kv-cache-memory-bytes", str(512 * 2**20)]
        on_cpu += ["--distributed-executor-backend", IN_ONE_PROCESS]
        return [*program, "--port", str(port), "--host", "127.0.0.1", *words, *on_cpu]


ROOT = Path(__file__).parents[1]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
}


def open_engine(path: Path, engine: str, url: str | None = None, **generator: object) -> Engine:
    """An engine of the model in the folder, as a run's configuration would make it."""
    ours = {engine: {"url": url}} if url else {}
    config = run_config(path, engine=engine, **ours, **generator)
    return make_engine(config, seed=0)


def run_config(path: Path, **generator: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"folder": str(path)},
            "model": {"path": str(path)},
            "data": {"source": "copy", "max_prompt_length": 8},
            "generator": {"max_new_tokens": 1, **generator},
        }
    )


KEY = b"k" * 40


def update_to(model: LlamaForCausalLM, version: int, path: Path) -> WeightUpdate:
    """An update to the model's weights, which it saves to the path."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    layout = Layout(manifest_of(parameters), 2**28)
    data = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for slot in layout.slots:
        slot.write(slot.of(data), parameters[slot.spec.name])
    write_whole(path, layout, data, KEY)
    return WeightUpdate(
        policy_version=version,
        learner_id="test",
        manifest=layout.manifest,
        endpoint=FilesEndpoint(path=str(path)),
        key=KEY,
    )


class SharingLearner:
    """Send buffers of this process, for models with the parameters of the first one."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        manifest = manifest_of(dict(model.named_parameters()))
        self._buffers = SendBuffers(Layout(manifest, 2**16), "cpu")

    def update_to(self, model: LlamaForCausalLM, version: int) -> WeightUpdate:
        """An update to the model's weights, valid until the second one after it."""
        self._buffers.write(dict(model.named_parameters()), version)
        with self._buffers.reading() as held:
            assert held is not None
            endpoint = self._buffers.endpoint(held, KEY)
        return WeightUpdate(
            policy_version=version,
            learner_id="test",
            manifest=self._buffers.layout.manifest,
            endpoint=endpoint,
            key=KEY,
        )
