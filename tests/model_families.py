"""Tiny random models of many families, whose log-probabilities are far from uniform; and when two
passes of one have the same gradients."""

from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

_SETTINGS = yaml.safe_load((Path(__file__).parent / "data" / "model_families.yaml").read_text())
DOCUMENTED: dict[str, dict[str, Any]] = _SETTINGS["families"]
"""With the newest transformers."""
FAMILIES = {name: of for name, of in DOCUMENTED.items() if of["model_type"] in CONFIG_MAPPING}
REFUSED: dict[str, dict[str, Any]] = _SETTINGS["refused"]
VOCAB_SIZE: int = _SETTINGS["base"]["vocab_size"]
WINDOW: int = _SETTINGS["window"]
STATEFUL = {
    "Bailing-Hybrid",
    "Bamba",
    "DeepSeek-V4",
    "Falcon-H1",
    "Granite-MoE-Hybrid",
    "Jamba",
    "Kimi-Linear",
    "Mamba",
    "Mamba 2",
    "MiniMax",
    "Nemotron-H",
    "OLMo-Hybrid",
    "Qwen3-Next",
    "Qwen3.5",
    "Qwen3.5-MoE",
    "RecurrentGemma",
    "RWKV",
    "xLSTM",
    "Zamba 2",
}
"""Families with layers that carry a state from token to token."""
SEEN_BY_TRIAL = {"Doge", "Nemotron", "StableLM"}
"""Families of attention alone, of which only a trial shows that their code cannot run packed."""
UNPACKED = {
    *(STATEFUL | SEEN_BY_TRIAL),
    "BLOOM",
    "DeepSeek-V3.2",
    "Falcon",
    "Falcon with ALiBi",
    "GLM-5",
    "GPT-Neo",
    "Inkling",
    "Inkling 2",
    "LFM2",
    "LFM2-MoE",
    "LFM3",
    "Llama 4",
    "MPT",
}
"""Families that packing would change, without the kernels that know where a trajectory ends."""
_ROUTED = (
    "AFMoE",
    "Bailing-Hybrid",
    "DeepSeek-V3",
    "DeepSeek-V3.2",
    "ERNIE 4.5-MoE",
    "GLM-4-MoE",
    "GLM-4.7-Flash",
    "GLM-5",
    "gpt-oss",
    "Granite-MoE",
    "Granite-MoE-Hybrid",
    "Kimi-Linear",
    "LFM2-MoE",
    "MiMo-V2-Flash",
    "MiniMax",
    "MiniMax-M2",
    "Mixtral",
    "OLMoE",
    "Qwen2-MoE",
    "Qwen3-MoE",
    "Qwen3-Next",
    "Qwen3.5-MoE",
)
ROUTED = tuple(family for family in _ROUTED if family in FAMILIES)
"""Families with routers whose choice can be replayed."""
RELATIVE = 2e-4
"""Of a parameter's largest gradient."""
ABSOLUTE = 1e-5
"""Of the model's: that of a bias which shifts all scores of a softmax alike is rounding alone."""


def config_of(family: str, **overrides: object) -> Any:
    settings = {**_SETTINGS["base"], **(FAMILIES | REFUSED)[family], **overrides}
    return AutoConfig.for_model(**{k: v for k, v in settings.items() if v is not None})


def make_model(family: str, seed: int = 0, **overrides: object) -> Any:
    """With weights so large that log-probabilities depend on all that a token may see."""
    config = config_of(family, **overrides)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        logits = model(input_ids=torch.arange(VOCAB_SIZE)[None], use_cache=False).logits
        model.get_output_embeddings().weight.mul_(3.0 / logits.std())
    return model


def plain_logprobs(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """[T - 1] of each token of a sequence [T] but the first, by the model's own `forward`."""
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]


def gradients_of(network: Any, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """By parameter, of log-probabilities [R] with different weights; their graph is used up."""
    network.zero_grad()
    weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
    (logprobs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within RELATIVE or ABSOLUTE, the larger bound."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        bound = max(RELATIVE * float(gradient.abs().max()), ABSOLUTE * largest)
        assert float((found[name] - gradient).abs().max()) <= bound, name
