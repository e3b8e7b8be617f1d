"""The policy or the reference policy: a network, and which of its parameters are trained, sent and
saved.

Invariant: parameters have the names that transformers gives them, here, in checkpoints and on the
weight channel; master weights are float32.
Shapes: R response tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from learners.batch.micro_batch import MicroBatch
from learners.parallel.mesh import Mesh, described, full
from learners.policy.hugging_face import kept_in_float32, save_model
from learners.policy.loading import load_network
from learners.policy.lora import (
    Whole,
    adapter_factors,
    merged_weights,
    with_adapter,
    without_adapter,
)
from learners.policy.network import Network, NetworkOutput
from learners.policy.sharding import end_passes, master_of
from streamrl.algorithms.candidates import Likeliest
from streamrl.config import RunConfig
from streamrl.config.learner import LoraSettings
from streamrl.config.model import ModelSettings
from streamrl.config.weights import WeightSettings
from streamrl.weights import float8
from streamrl.weights.layout import Layout, manifest_of


class Policy:
    """Calling it makes one forward pass of its network, whose model has an adapter if `lora` says
    so."""

    def __init__(self, network: Network, lora: LoraSettings | None = None) -> None:
        self.network = network
        self._lora = lora

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        path: Path | str | None = None,
        mesh: Mesh | None = None,
        *,
        is_reference: bool = False,
    ) -> "Policy":
        """The run's policy with the weights at `path`, by default `model.path`, and with a new
        adapter if `learner.lora` asks for one."""
        lora = None if is_reference else config.learner.lora
        network = load_network(config, path, lora=lora, mesh=mesh, is_reference=is_reference)
        return cls(network, lora)

    @classmethod
    def reference_of(cls, config: RunConfig, policy: "Policy", mesh: Mesh | None) -> "Policy":
        """The policy of `model.path` as reference; with an adapter it is the same network without
        it."""
        if policy._lora is not None:
            return _WithoutAdapter(policy.network, policy._lora)
        return cls.from_config(config, mesh=mesh, is_reference=True)

    def __call__(self, micro_batch: MicroBatch, **asked: Any) -> NetworkOutput:
        """A forward pass; `asked` are arguments of `Network.forward`."""
        output: NetworkOutput = self.network(micro_batch, **asked)
        return output

    @property
    def model(self) -> PreTrainedModel:
        return self.network.model

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def num_tokens(self) -> int:
        """Rows of the LM head."""
        head: Any = self.model.get_output_embeddings()
        return int(head.weight.shape[0])

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name, tied ones once."""
        named = self.model.named_parameters()
        return {name: master_of(p) for name, p in named if p.requires_grad}

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The tensors that generators are sent, by name; sharded parameters stay sharded."""
        return self._sent(full)

    def layout(self, settings: WeightSettings) -> Layout:
        """The layout of `weights` in the dtype to be sent, except what is `kept_in_float32`; needs
        no other rank."""
        dtype = getattr(torch, settings.dtype) if settings.dtype else None
        loaded_in = torch.bfloat16 if dtype == float8.DTYPE else dtype
        exact = kept_in_float32(self.model, loaded_in) if loaded_in else ()
        return Layout(manifest_of(self._sent(described), dtype, exact), settings.bucket_bytes)

    def _sent(self, whole: Whole) -> Mapping[str, torch.Tensor]:
        if self._lora is None:
            return self.parameters()
        sent = adapter_factors if self._lora.publish == "adapter" else with_adapter
        return sent(self.model, whole)

    @torch.no_grad()
    def batch_logprobs(
        self,
        micro_batches: Sequence[MicroBatch],
        num_tokens: int,
        top: Likeliest | None = None,
    ) -> torch.Tensor:
        """Log-probabilities [R of the whole batch] in nats, on the CPU; `num_tokens` is R. The
        likeliest tokens are written to `top`."""
        logprobs = torch.zeros(num_tokens)
        for micro_batch in micro_batches:
            computed = self(micro_batch, num_likeliest=0 if top is None else top.token_ids.shape[1])
            assert computed.logprobs is not None, "they are asked for by default"
            logprobs[micro_batch.responses] = computed.logprobs.float().cpu()
            if top is not None:
                assert computed.likeliest is not None, "they are asked for"
                top.token_ids[micro_batch.responses] = computed.likeliest.token_ids.cpu()
                top.logprobs[micro_batch.responses] = computed.likeliest.logprobs.cpu()
        end_passes(self.network)
        return logprobs

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that belong to the model's state, by name; no step changes them."""
        names = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in names}

    def save(
        self, folder: Path, settings: ModelSettings, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Save the policy; see `save_model`. `weights` are its parameters and buffers, whole, on
        the CPU."""
        if weights and self._lora is not None:
            weights = merged_weights(self._lora, settings, weights)
        save_model(folder, self.model.config, settings, weights)


class _WithoutAdapter(Policy):
    """The policy without its adapter, for passes without gradient."""

    def __call__(self, micro_batch: MicroBatch, **asked: Any) -> NetworkOutput:
        with without_adapter(self.model):
            return super().__call__(micro_batch, with_records=False, **asked)
