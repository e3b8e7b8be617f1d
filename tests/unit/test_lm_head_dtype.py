"""`generator.lm_head_dtype`: logits in float32 beside weights of a narrower dtype."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from actors.engines.hf.engine import HfEngine, load_model
from actors.engines.sglang.server import launch_command
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.types import SamplingParams
from tests.engines import update_to
from tests.tiny_model import VOCAB_SIZE, make_llama, save_llama

PROMPT = (5, 6, 7)


def configure(path: Path | str = "unused", **generator: Any) -> RunConfig:
    settings = {"dtype": "bfloat16", "max_new_tokens": 16, "device": "cpu", **generator}
    data = {"source": "addition", "max_prompt_length": 16}
    return RunConfig.model_validate(
        {"model": {"path": str(path)}, "data": data, "generator": settings}
    )


def of_engine(model: PreTrainedModel, token_ids: NDArray[np.int32]) -> torch.Tensor:
    """Log-probabilities of tokens behind the prompt, with logits from the engine's hidden states in
    float64: what no rounding in the LM head is."""
    ids = torch.tensor([[*PROMPT, *token_ids.tolist()]])
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0].double()
        logits = hidden @ model.get_output_embeddings().weight.double().T
    rows = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    return rows.gather(1, ids[0, len(PROMPT) :, None])[:, 0]


@pytest.mark.parametrize("tied", [False, True])
async def test_logits_of_a_float32_head_are_not_rounded(tmp_path: Path, tied: bool) -> None:
    """Also after an update, which replaces the weights."""
    save_llama(tmp_path, tie_word_embeddings=tied)
    found = {}
    for head in (None, "float32"):
        config = configure(tmp_path, lm_head_dtype=head)
        engine = HfEngine.from_config(config, seed=0)
        try:
            for version in (0, 1):
                if version:
                    newer = make_llama(1, tie_word_embeddings=tied)
                    await engine.load_weights(update_to(newer, 1, tmp_path / "update"))
                sampling = SamplingParams(max_new_tokens=16, ignore_eos=True, seed=3)
                completion = await engine.generate(PROMPT, sampling)
                model = engine._batch._model
                exact = await asyncio.to_thread(of_engine, model, completion.token_ids)
                error = (torch.from_numpy(completion.logprobs) - exact).abs().max()
                found[head, version] = float(error)
        finally:
            await engine.close()
    for version in (0, 1):
        assert found["float32", version] < found[None, version], found


def test_the_dtype_of_the_weights_stays(tmp_path: Path) -> None:
    save_llama(tmp_path)
    model = load_model(configure(tmp_path, lm_head_dtype="float32"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.tensor([PROMPT])).logits.dtype == torch.float32
    assert model.get_output_embeddings().weight.shape[0] == VOCAB_SIZE


def test_sglang_is_given_its_flag() -> None:
    for head in (None, "float32"):
        command = launch_command(
            configure(engine="sglang", lm_head_dtype=head), host="127.0.0.1", port=1, seed=0
        )
        assert ("--enable-fp32-lm-head" in command) == (head is not None)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dtype": "float32"}, "set dtype to bfloat16"),
        ({"engine": "vllm", "vllm": {"url": "http://a:1"}}, "--hf-overrides"),
        ({"engine": "sglang", "sglang": {"url": "http://a:1"}}, "--enable-fp32-lm-head"),
    ],
)
def test_where_it_cannot_act_it_is_refused(settings: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"lm_head_dtype: was 'float32'.*{sentence}"):
        configure(**{"lm_head_dtype": "float32", **settings})


def test_a_model_without_a_linear_head_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    save_llama(tmp_path)
    monkeypatch.setattr(PreTrainedModel, "get_output_embeddings", lambda _: None)
    with pytest.raises(ConfigError, match="llama has no linear LM head"):
        load_model(configure(tmp_path, lm_head_dtype="float32"))
