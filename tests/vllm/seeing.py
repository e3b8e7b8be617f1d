"""A program that samples answers to one image, with the weights of two versions in turn.

    python -m tests.vllm.seeing FOLDER

Its last line has, by version, how far the recorded log-probabilities are from transformers' own
forward pass of that version's weights.
"""

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from actors.engines import make_engine
from streamrl.types import Completion, Media, SamplingParams
from tests.engines import update_to
from tests.tiny_vision import END, IMAGE, RECIPE, START, image_processor, make_qwen, png, save_qwen
from tests.training import make_config

# vLLM serves no narrower heads on a CPU.
WIDER = RECIPE.model_copy(update={"hidden_size": 64})
SEEN = png(48, 48)
PROMPT = [START, *[IMAGE] * 9, END, 1]
NUM_ANSWERS = 6


async def main(folder: Path) -> None:
    config = make_config(
        model={"path": str(save_qwen(folder / "model", WIDER))},
        generator={"engine": "vllm", "dtype": "float32", "max_model_len": 64, "num_threads": 1},
    )
    engine = make_engine(config, seed=0)
    first, second = make_qwen(recipe=WIDER), other_eyes()
    errors = {"0": await answered(engine, first)}
    await engine.load_weights(update_to(second, 1, folder / "weights"))
    errors["1"] = await answered(engine, second)
    await engine.close()
    print(json.dumps(errors))


def other_eyes() -> Any:
    """The first model but for its vision tower."""
    model = make_qwen(recipe=WIDER)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "visual" in name and parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


async def answered(engine: Any, model: Any) -> float:
    """The largest error of several answers."""
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    media = [Media.image(SEEN)]
    completions = [await engine.generate(PROMPT, sampling, media=media) for _ in range(NUM_ANSWERS)]
    return max(error(model, one) for one in completions if IMAGE not in one.token_ids)


def error(model: Any, completion: Completion) -> float:
    read = image_processor()(images=[Image.open(io.BytesIO(SEEN))], return_tensors="pt")
    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).long(), **read).logits
    logprobs = torch.log_softmax(logits[0, len(PROMPT) - 1 : -1].float(), -1)
    index = torch.from_numpy(completion.token_ids).long()[:, None]
    return float(np.abs(logprobs.gather(-1, index)[:, 0].numpy() - completion.logprobs).max())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
