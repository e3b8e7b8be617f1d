"""The model's own count of floating-point operations, and what a device can do at most.

A forward pass costs two operations per token for each weight of a matrix product, and attention
four per pair of tokens for each of its channels, in the layers that have it; a token sees itself
and earlier ones, so a trajectory of n tokens has n (n + 1) / 2 pairs, fewer under a sliding window.
A backward pass costs twice as much, half of it only for weights that are trained. The LM head
counts for the response tokens alone, since no other logits are computed; of experts those that a
token is routed to. A token that several trajectories share counts once, except in attention. What
is recomputed to save memory does not count, nor do element-wise operations and the state of
recurrent layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from learners.policy.network import Network

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "NVIDIA B200": {"bfloat16": 2250.0, "float32": 80.0},
    "NVIDIA H200": {"bfloat16": 989.5, "float32": 67.0},
    "NVIDIA GH200": {"bfloat16": 989.5, "float32": 67.0},
    "NVIDIA H100 PCIe": {"bfloat16": 756.0, "float32": 51.0},
    "NVIDIA H100 NVL": {"bfloat16": 835.0, "float32": 60.0},
    "NVIDIA H100": {"bfloat16": 989.5, "float32": 67.0},
    "NVIDIA A100": {"bfloat16": 312.0, "float32": 19.5},
    "NVIDIA L40S": {"bfloat16": 362.0, "float32": 91.6},
    "NVIDIA L4": {"bfloat16": 121.0, "float32": 30.3},
    "NVIDIA GeForce RTX 4090": {"bfloat16": 165.2, "float32": 82.6},
    "AMD Instinct MI300X": {"bfloat16": 1307.4, "float32": 163.4},
}
"""Dense, by the beginning of `torch.cuda.get_device_name` and by compute dtype; the first that fits
counts. From the vendors' data sheets; float32 without tensor cores."""


def peak_flops(device: torch.device, dtype: str, given_tflops: float | None) -> float | None:
    """Operations per second of one device, as given or as known by its name; None if neither."""
    if given_tflops is not None:
        return 1e12 * given_tflops
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = (peaks for prefix, peaks in PEAK_TFLOPS.items() if _is_named(name, prefix))
    tflops = next(known, {}).get(dtype)
    return None if tflops is None else 1e12 * tflops


def _is_named(name: str, prefix: str) -> bool:
    """Whether the name begins with these words; an L4 is no L40.

    >>> _is_named("NVIDIA L40S", "NVIDIA L4"), _is_named("NVIDIA A100-SXM4-80GB", "NVIDIA A100")
    (False, True)
    """
    return name.startswith(prefix) and not name[len(prefix) : len(prefix) + 1].isalnum()


@dataclass(frozen=True)
class NetworkFlops:
    """What a pass of one network costs."""

    num_weights: float
    """Of the decoder's matrices, those that a token meets."""
    num_trained: float
    """Those of them that are trained."""
    num_head_weights: int
    attention_channels: tuple[tuple[int, int | None], ...]
    """Per layer that attends: heads times their width, and the sliding window."""

    @classmethod
    def of(cls, network: Network) -> "NetworkFlops":
        model: Any = network.model
        config = model.config.get_text_config()
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        routed = _routed_share(config)
        embeddings = {p for m in decoder.modules() if _is_embedding(m) for p in m.parameters()}
        weights = [
            (parameter.numel() * (routed if ".experts." in f".{name}" else 1.0), parameter)
            for name, parameter in decoder.named_parameters()
            if parameter.ndim > 1 and parameter not in embeddings
        ]
        return cls(
            num_weights=sum(count for count, _ in weights),
            num_trained=sum(count for count, parameter in weights if parameter.requires_grad),
            num_head_weights=head.weight.numel(),
            attention_channels=_attention(config),
        )

    def forward(
        self, lengths: Sequence[int], num_logits: int, num_tokens: int | None = None
    ) -> float:
        """Of trajectories of these lengths, with logits for so many tokens; they have `num_tokens`
        where they share some."""
        num_tokens = sum(lengths) if num_tokens is None else num_tokens
        linear = 2.0 * (self.num_weights * num_tokens + self.num_head_weights * num_logits)
        return linear + self._attention(lengths)

    def backward(
        self, lengths: Sequence[int], num_logits: int, num_tokens: int | None = None
    ) -> float:
        num_tokens = sum(lengths) if num_tokens is None else num_tokens
        heads = 4.0 * self.num_head_weights * num_logits
        linear = 2.0 * (self.num_weights + self.num_trained) * num_tokens
        return linear + heads + 2.0 * self._attention(lengths)

    def _attention(self, lengths: Sequence[int]) -> float:
        windows = {window for _, window in self.attention_channels}
        pairs = {window: sum(_num_pairs(n, window) for n in lengths) for window in windows}
        return sum(4.0 * channels * pairs[window] for channels, window in self.attention_channels)


def _num_pairs(length: int, window: int | None) -> float:
    """Of a token and one that it sees.

    >>> _num_pairs(4, None), _num_pairs(4, 2)
    (10.0, 7.0)
    """
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) / 2 + (length - seen) * seen


def _attention(config: Any) -> tuple[tuple[int, int | None], ...]:
    num_heads = getattr(config, "num_attention_heads", 0)
    if not num_heads:
        return ()
    width = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    return tuple(
        (num_heads * width, window if kind == "sliding_attention" else None)
        for kind in kinds
        if kind in ("full_attention", "sliding_attention", "chunked_attention")
    )


def _routed_share(config: Any) -> float:
    """The part of the experts' weights that a token meets."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((n for n in (getattr(config, name, None) for name in names) if n), None)
    return getattr(config, "num_experts_per_tok", num_experts) / num_experts if num_experts else 1.0


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding)
