"""The policy, or its reference: a network, and how it is loaded and saved.

Invariant: parameters have the names that transformers gives them, here, in checkpoints and on the
weight channel; master weights are float32.
Shapes: R response tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from learners.batch import MicroBatch
from learners.parallel.mesh import Mesh
from learners.policy.compiled import compile_layers
from learners.policy.distribute import distribute
from learners.policy.hugging_face import save_model
from learners.policy.master_weights import master_of
from learners.policy.network import Network, NetworkOutput
from learners.policy.packing_check import choose_packing
from streamrl.config import RunConfig
from streamrl.errors import ConfigError


class Policy:
    """Calling it is one forward pass of its network."""

    def __init__(self, network: Network) -> None:
        self.network = network

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        path: Path | str | None = None,
        mesh: Mesh | None = None,
        *,
        is_reference: bool = False,
    ) -> "Policy":
        """The run's policy with the weights at `path`, by default those of `model.path`."""
        return cls(load_network(config, path, mesh=mesh, is_reference=is_reference))

    def __call__(
        self,
        micro_batch: MicroBatch,
        *,
        with_logprobs: bool = True,
        with_entropy: bool = False,
        trains_entropy: bool = True,
        reference: NetworkOutput | None = None,
    ) -> NetworkOutput:
        output: NetworkOutput = self.network(
            micro_batch,
            with_logprobs=with_logprobs,
            with_entropy=with_entropy,
            trains_entropy=trains_entropy,
            reference=reference,
        )
        return output

    @property
    def model(self) -> PreTrainedModel:
        return self.network.model

    @property
    def device(self) -> torch.device:
        return self.network.device

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name, tied ones once."""
        return {name: master_of(p) for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def batch_logprobs(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> torch.Tensor:
        """[R of the whole batch] in nats, on the CPU; `num_tokens` is R."""
        logprobs = torch.zeros(num_tokens)
        for micro_batch in micro_batches:
            computed = self(micro_batch).logprobs
            assert computed is not None, "they are asked for by default"
            logprobs[micro_batch.responses] = computed.float().cpu()
        return logprobs

    def buffers(self) -> dict[str, torch.Tensor]:
        """Those that belong to the model's state, by name; no step changes them."""
        names = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in names}

    def save(self, folder: Path, config: RunConfig, weights: Mapping[str, torch.Tensor]) -> None:
        """See `save_model`; `weights` are those of parameters and buffers, whole, on the CPU."""
        save_model(folder, self.model.config, config.model, weights)


def load_network(
    config: RunConfig,
    path: Path | str | None = None,
    *,
    has_values: bool = False,
    is_reference: bool = False,
    mesh: Mesh | None = None,
) -> Network:
    """With the weights at `path`, by default those of `model.path`; distributed over a mesh.

    Raises:
        ConfigError: there is no model, or the settings of `learner` do not fit it.
    """
    learner = config.learner
    name = str(path or config.model.path)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no model at {name!r}: {error}") from error
    network = Network(
        model.to(device_of(learner.device) if mesh is None else mesh.device),
        temperature=config.generator.temperature,
        has_values=has_values,
    )
    if learner.check_packing:
        choose_packing(network)
    if learner.compile:
        compile_layers(network)
    distribute(network, mesh, learner, is_reference=is_reference)
    return network


def device_of(name: str) -> torch.device:
    """`auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
