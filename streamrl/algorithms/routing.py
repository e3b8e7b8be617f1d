"""Replacing the experts that the routers of a mixture-of-experts model choose.

A router scores all experts, takes the K best with one `torch.topk`, and turns their scores into
weights by the rule of its family:

    softmax over all experts, then over the K of them if norm_topk_prob    Qwen, OLMoE, Mixtral
    softmax over the scores of the K                                       gpt-oss, Granite
    sigmoid, the K of them divided by their sum and scaled                 DeepSeek-V3, GLM-4, dots

`choosing` replaces the result of that one call with the experts that the caller names; all the
rest, including the weights and their gradients, is the router's own code.

Invariant: given the experts that the router would have chosen, its results do not change.
Shapes: N tokens of a call, E experts, K per token.

`ROUTERS` are the class names of transformers' routers whose weights depend on the chosen experts
alone. Others mask the scores of experts that were not chosen (DeepSeek-V2's groups) or make no such
call (Phi-MoE's sampler); their weights would be wrong, so they are refused by name.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from streamrl.errors import ConfigError
from streamrl.placement.limits import require_experts

ROUTERS = frozenset(
    {
        "AfmoeTokenChoiceRouter",
        "BailingHybridTopkRouter",
        "DeepseekV32TopkRouter",
        "DeepseekV3TopkRouter",
        "Ernie4_5_MoeTopKRouter",
        "Glm4MoeLiteTopkRouter",
        "Glm4MoeTopkRouter",
        "GlmMoeDsaTopkRouter",
        "GptOssTopKRouter",
        "GraniteMoeHybridTopKRouter",
        "GraniteMoeTopKRouter",
        "KimiLinearTopkRouter",
        "Lfm2MoeTopKRouter",
        "MiMoV2FlashTopkRouter",
        "MiniMaxM2TopKRouter",
        "MiniMaxTopKRouter",
        "MixtralTopKRouter",
        "OlmoeTopKRouter",
        "Qwen2MoeTopKRouter",
        "Qwen3MoeTopKRouter",
        "Qwen3NextTopKRouter",
        "Qwen3_5MoeTopKRouter",
    }
)
_LAYER = re.compile(r"((?:.*?\.)?layers)\.(\d+)\.")
_IS_ROUTER = re.compile(r"(Router|(?<!Forget)Gate)$")

Choose = Callable[[torch.Tensor], torch.Tensor]
"""From the experts [N, K] that the router would choose to those that the tokens get."""


class _Choosing(TorchFunctionMode):
    def __init__(self, num_experts: int, choose: Choose) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._choose = choose

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return output
        # Some routers first choose groups of experts, from scores [N, groups, E / groups].
        if args[0].ndim != 2 or args[0].shape[1] != self._num_experts:
            return output
        chosen = self._choose(output.indices)
        if chosen is output.indices:
            return output
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


def choosing(router: torch.nn.Module, choose: Choose) -> None:
    """Make `choose` decide from now on which experts the router's tokens get."""
    router.forward = partial(_routed, router.forward, router, choose)


def _routed(forward: Any, router: Any, choose: Choose, *inputs: Any, **options: Any) -> Any:
    with _Choosing(num_experts_of(router), choose):
        return forward(*inputs, **options)


def num_experts_of(router: Any) -> int:
    """E"""
    return int(router.num_experts)


def routers(model: PreTrainedModel, setting: str) -> dict[str, torch.nn.Module]:
    """The routers of the model's decoder, by name.

    Raises:
        ConfigError: there are none, or an unknown one; `setting` is what needs them.
    """
    found, unknown = {}, set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ROUTERS and _LAYER.match(name):
            found[name] = module
        elif _IS_ROUTER.search(kind):
            unknown.add(kind)
    family = model.config.get_text_config().model_type
    if unknown:
        raise ConfigError(
            f"{setting}, and {family} chooses its experts by {' and '.join(sorted(unknown))}, "
            f"whose weights of other experts are not known; known are {', '.join(sorted(ROUTERS))}"
        )
    if not found:
        require_experts({"model_type": family}, setting)
    return found


def layer_of(router: str) -> tuple[str, int]:
    """The decoder layer of a router with this name: the name of the layer list, and the number.

    >>> layer_of("model.layers.3.mlp.gate")
    ('model.layers', 3)
    """
    match = _LAYER.match(router)
    assert match is not None, "`routers` has no other ones"
    return match.group(1), int(match.group(2))
