"""Engines for the contract suite, each holding the tiny Llama of seed 0 at version 0.

vLLM takes many seconds to start, so its engines are kept and given their first weights back before
the next test; HF engines are made anew.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from actors.engines import make_engine
from streamrl.config import RunConfig
from streamrl.interfaces import Engine
from streamrl.types import FilesEndpoint, WeightUpdate
from streamrl.weights.layout import manifest_of
from tests.tiny_model import make_llama

MakeEngine = Callable[..., Awaitable[Engine]]


def make_model(seed: int = 0, **overrides: object) -> LlamaForCausalLM:
    """The tiny Llama with heads that vLLM's CPU kernels take, and room for long completions."""
    return make_llama(seed, **{"head_dim": 32, "max_position_embeddings": 4096, **overrides})


class HfEngines:
    """A new engine for each request; all are closed before the next test."""

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
        engine = HfEngine(model, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
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
            path = self._folder / dtype
            model.save_pretrained(path)
            self._kept[shape] = open_vllm(
                path, max_num_seqs=max_num_seqs, max_model_len=max_model_len, dtype=dtype
            )
        return self._kept[shape]

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


def open_vllm(path: Path, **generator: object) -> Engine:
    """A vLLM engine of the model in the folder, as a run's configuration would make it."""
    settings = {"engine": "vllm", "max_new_tokens": 1, **generator}
    config = {
        "model": {"path": str(path)},
        "data": {"source": "copy", "max_prompt_length": 8},
        "generator": settings,
    }
    return make_engine(RunConfig.model_validate(config), seed=0)


def update_to(model: LlamaForCausalLM, version: int, path: Path) -> WeightUpdate:
    """An announcement of the model's weights, which it saves to the path."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_file(parameters, path)
    return WeightUpdate(
        policy_version=version,
        history="test",
        manifest=manifest_of(parameters),
        endpoint=FilesEndpoint(path=str(path)),
    )
