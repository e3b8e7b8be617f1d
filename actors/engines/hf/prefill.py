"""What a forward pass takes of several prompts at once, and where their last logits are.

Shapes: P prompts, L tokens of the longest.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Prefill(NamedTuple):
    """`inputs` of the model; `last` [P] is the index of each prompt's last kept logits."""

    inputs: dict[str, Any]
    last: torch.Tensor


def right_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Prefill:
    """Padding on the right, where causal attention does not read it."""
    longest = max(map(len, prompts))
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    kept, last = torch.unique(ends, return_inverse=True)
    token_ids = torch.tensor(rows, device=device)
    return Prefill({"input_ids": token_ids, "logits_to_keep": kept}, last)


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Prefill:
    """Padding on the left, under a mask; prompts of one length have neither."""
    longest = max(map(len, prompts))
    rows = [[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts]
    inputs: dict[str, Any] = {"input_ids": torch.tensor(rows, device=device)}
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    if padding.any():
        positions = torch.arange(longest, device=device) - padding[:, None]
        inputs["attention_mask"] = (positions >= 0).long()
        inputs["position_ids"] = positions.clamp_min(0)
    return Prefill(inputs, torch.full((len(prompts),), -1, device=device))
