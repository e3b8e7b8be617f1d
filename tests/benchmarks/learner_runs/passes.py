"""What bench_learner times: forward and backward over the same trajectories, our way and plainly.

Our way is the learner's: packed micro-batches, logits at response positions only, in blocks. The
plain way is what a trainer without either does: right-padded micro-batches in the order of the
batch, logits of every position, log_softmax.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from learners.batch.training_batch import TrainingBatch
from learners.policy.network import Network
from learners.policy.sharding import compute_in
from streamrl.types import FinishReason, Trajectory, TrajectoryGroup

SMALL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMOLLM2_135M = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@dataclass(frozen=True)
class Load:
    """A model's shape, trajectories of log-normal length, and how they share a pass."""

    shape: dict[str, int]
    num_sequences: int
    median: int
    longest: int
    max_tokens: int
    """Of a packed micro-batch."""
    padded_sequences: int = 0
    """Of a padded micro-batch, which has about as many tokens."""
    group_size: int = 1
    prompt_tokens: int = 16


LOADS = {
    "padding": Load(SMALL, 32, 100, 1024, max_tokens=2048, padded_sequences=8),
    "precision": Load(SMOLLM2_135M, 16, 100, 256, max_tokens=2048, padded_sequences=4),
    "memory": Load(SMOLLM2_135M, 8, 120, 512, max_tokens=1024, padded_sequences=4),
    "siblings": Load(SMALL, 64, 200, 1024, max_tokens=2048, group_size=8, prompt_tokens=100),
}


def make_model(shape: dict[str, int]) -> LlamaForCausalLM:
    """Random weights, tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=2048)
    return LlamaForCausalLM(config).train()


def make_batch(load: Load) -> TrainingBatch:
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(math.log(load.median), 1.0, load.num_sequences)
    lengths = np.clip(drawn, load.prompt_tokens + 8, load.longest).astype(int)
    groups = tuple(
        TrajectoryGroup(
            group_id=str(i),
            prompt_index=i,
            environment="benchmark",
            trajectories=_siblings(rng, own, load),
        )
        for i, own in enumerate(lengths.reshape(-1, load.group_size).tolist())
    )
    return TrainingBatch.of(groups, policy_version=1)


def _siblings(rng: np.random.Generator, lengths: list[int], load: Load) -> tuple[Trajectory, ...]:
    vocab_size, num_prompt = load.shape["vocab_size"], load.prompt_tokens
    prompt = rng.integers(0, vocab_size, num_prompt)
    responses = (rng.integers(0, vocab_size, length - num_prompt) for length in lengths)
    return tuple(make_trajectory(prompt, response) for response in responses)


def make_trajectory(
    prompt: NDArray[np.int64],
    response: NDArray[np.int64],
    *,
    reward: float = 1.0,
    logprob: float = -1.0,
) -> Trajectory:
    mask = np.arange(len(prompt) + len(response)) >= len(prompt)
    return Trajectory(
        token_ids=np.concatenate([prompt, response]).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, logprob, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=reward,
        finish_reason=FinishReason.STOP,
    )


class Packed:
    """Forward and backward over all of the load; `dtype` is that of the computation."""

    def __init__(self, load: Load, dtype: str = "float32", *, shares_prompts: bool = True) -> None:
        self._load, self._batch = load, make_batch(load)
        self._shares_prompts = shares_prompts
        self.model = make_model(load.shape)
        self._network = Network(self.model, temperature=1.0)
        compute_in(self._network, getattr(torch, dtype))

    def __call__(self) -> None:
        self.model.zero_grad()
        shares_prompts, limit = self._shares_prompts, self._load.max_tokens
        for micro_batch in self._batch.pack(
            limit, torch.device("cpu"), shares_prompts=shares_prompts
        ):
            (-self._network(micro_batch).logprobs.sum()).backward()


class Padded:
    """The same, plainly, in float32."""

    def __init__(self, load: Load) -> None:
        self._load, self._batch = load, make_batch(load)
        self.model = make_model(load.shape)

    def __call__(self) -> None:
        self.model.zero_grad()
        for ids, attended, is_response in padded_batches(
            self._batch.trajectories, self._load.padded_sequences
        ):
            logits = self.model(input_ids=ids, attention_mask=attended).logits[:, :-1]
            chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-chosen[is_response[:, 1:]].sum()).backward()


def padded_batches(
    trajectories: Sequence[Trajectory], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Token ids, attention mask and response mask [sequences, longest]."""
    for start in range(0, len(trajectories), size):
        chosen = trajectories[start : start + size]
        columns = (
            [torch.from_numpy(t.token_ids).long() for t in chosen],
            [torch.ones(t.num_tokens, dtype=torch.bool) for t in chosen],
            [torch.from_numpy(t.response_mask) for t in chosen],
        )
        ids, attended, is_response = (
            torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in columns
        )
        yield ids, attended, is_response


def gradient_gap(load: Load) -> float:
    """The largest difference between the two ways' gradients, over the largest gradient."""
    ours, plain = Packed(load), Padded(load)
    ours()
    plain()
    pairs = zip(ours.model.parameters(), plain.model.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)
