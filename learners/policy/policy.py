"""The policy, or its reference: a network, and how it is loaded and saved.

Invariant: parameters have the names that transformers gives them, here, in checkpoints and on the
weight channel; master weights are float32.
Shapes: R response tokens.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from learners.micro_batch import MicroBatch
from learners.parallel.mesh import Mesh
from learners.policy.compiled import compile_layers
from learners.policy.distribute import distribute
from learners.policy.hugging_face import save_model
from learners.policy.lora import (
    Factors,
    MergedWeights,
    add_adapter,
    merged_weights,
    without_adapter,
)
from learners.policy.master_weights import master_of
from learners.policy.network import Network, NetworkOutput
from learners.policy.packing_check import choose_packing
from streamrl.config import RunConfig
from streamrl.config.learner import LoraSettings
from streamrl.errors import ConfigError
from streamrl.vision.families import auto_model_at
from streamrl.vision.patches import PatchReader
from streamrl.vision.tower import VisionTower, vision_tower


class Policy:
    """Calling it is one forward pass of its network, whose model has an adapter as `lora` says."""

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
        """The run's policy with the weights at `path`, by default those of `model.path`, and with a
        new adapter if `learner.lora` says so."""
        lora = None if is_reference else config.learner.lora
        network = load_network(config, path, lora=lora, mesh=mesh, is_reference=is_reference)
        return cls(network, lora)

    @classmethod
    def reference_of(cls, config: RunConfig, policy: "Policy", mesh: Mesh | None) -> "Policy":
        """The policy of `model.path`, which an adapter leaves where it is."""
        if policy._lora is not None:
            return _WithoutAdapter(policy.network, policy._lora)
        return cls.from_config(config, mesh=mesh, is_reference=True)

    def __call__(
        self,
        micro_batch: MicroBatch,
        *,
        with_logprobs: bool = True,
        with_entropy: bool = False,
        trains_entropy: bool = True,
        reference: NetworkOutput | None = None,
    ) -> NetworkOutput:
        with self._mode():
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
        """Those that are trained, by name, tied ones once."""
        named = self.model.named_parameters()
        return {name: master_of(p) for name, p in named if p.requires_grad}

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What generators are sent, by name; parameters that are sharded come as they are."""
        match self._lora:
            case None:
                return self.parameters()
            case settings if settings.publish == "adapter":
                return Factors(self.model)
            case _:
                return MergedWeights(self.model)

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
        if weights and self._lora is not None:
            weights = merged_weights(self._lora, config.model, weights)
        save_model(folder, self.model.config, config.model, weights)

    def _mode(self) -> AbstractContextManager[None]:
        """What a forward pass runs in."""
        return nullcontext()


class _WithoutAdapter(Policy):
    """For passes without gradient."""

    def _mode(self) -> AbstractContextManager[None]:
        return without_adapter(self.model)


def load_network(
    config: RunConfig,
    path: Path | str | None = None,
    *,
    has_values: bool = False,
    lora: LoraSettings | None = None,
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
        trust = config.model.trust_remote_code
        model: Any = auto_model_at(name, trust_remote_code=trust).from_pretrained(
            name, dtype=torch.float32, trust_remote_code=trust
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no model at {name!r}: {error}") from error
    if lora is not None:
        if mesh is not None and mesh.size("tensor") > 1:
            raise ConfigError(
                f"learner.mesh.tensor: was {mesh.size('tensor')}, and the matrices of learner.lora "
                "are not divided: set it to 1"
            )
        add_adapter(model, lora)
    network = Network(
        model.to(device_of(learner.device) if mesh is None else mesh.device),
        temperature=config.generator.temperature,
        has_values=has_values,
        tower=_tower(model, config, mesh),
    )
    if learner.check_packing:
        choose_packing(network)
    if learner.compile:
        compile_layers(network)
    distribute(network, mesh, learner, is_reference=is_reference)
    return network


def _tower(model: PreTrainedModel, config: RunConfig, mesh: Mesh | None) -> VisionTower | None:
    """
    Raises:
        ConfigError: ranks would share the tokens or the matrices of a model that sees images.
    """
    reader = PatchReader.of(config.model.path, trust_remote_code=config.model.trust_remote_code)
    tower = vision_tower(model, reader, is_trained=not config.learner.freeze_vision_tower)
    for axis in ("sequence", "tensor"):
        if tower is not None and mesh is not None and mesh.size(axis) > 1:
            raise ConfigError(
                f"learner.mesh.{axis}: was {mesh.size(axis)}; it must be 1 for a model that sees "
                f"images, such as this {model.config.model_type}"
            )
    return tower


def device_of(name: str) -> torch.device:
    """`auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
