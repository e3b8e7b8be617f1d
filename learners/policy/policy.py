"""The policy, or its reference: a network, and how it is loaded and saved.

Invariant: parameters have the names that transformers gives them, here, in checkpoints and on the
weight channel; master weights are float32.
Shapes: R response tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from learners.batch import MicroBatch
from learners.policy.compiled import compile_layers
from learners.policy.network import Network, NetworkOutput
from streamrl.config import RunConfig
from streamrl.errors import ConfigError


class Policy:
    """Calling it is one forward pass of its network."""

    def __init__(self, network: Network) -> None:
        self.network = network

    @classmethod
    def from_config(cls, config: RunConfig, path: Path | str | None = None) -> "Policy":
        """The run's policy with the weights at `path`, by default those of `model.path`."""
        return cls(load_network(config, path))

    def __call__(
        self,
        micro_batch: MicroBatch,
        *,
        with_logprobs: bool = True,
        with_entropy: bool = False,
        reference: NetworkOutput | None = None,
    ) -> NetworkOutput:
        output: NetworkOutput = self.network(
            micro_batch,
            with_logprobs=with_logprobs,
            with_entropy=with_entropy,
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
        return dict(self.model.named_parameters())

    @torch.no_grad()
    def batch_logprobs(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> torch.Tensor:
        """[R of the whole batch] in nats, on the CPU; `num_tokens` is R."""
        logprobs = torch.zeros(num_tokens)
        for micro_batch in micro_batches:
            computed = self(micro_batch).logprobs
            assert computed is not None, "they are asked for by default"
            logprobs[micro_batch.responses] = computed.float().cpu()
        return logprobs

    def save(self, folder: Path, tokenizer_path: str, *, trust_remote_code: bool) -> None:
        """A folder that transformers, vLLM and SGLang load.

        Raises:
            OSError, SafetensorError: it cannot be written.
        """
        self.model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_path, trust_remote_code=trust_remote_code
        )
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:
            # The tokenizers library has no class of its own for a file that it cannot write.
            if type(error) is Exception:
                raise OSError(str(error)) from error
            raise


def load_network(
    config: RunConfig, path: Path | str | None = None, *, has_values: bool = False
) -> Network:
    """With the weights at `path`, by default those of `model.path`.

    Raises:
        ConfigError: there is no model.
    """
    learner = config.learner
    name = str(path or config.model.path)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no model at {name!r}: {error}") from error
    if learner.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    network = Network(
        model.to(device_of(learner.device)),
        temperature=config.generator.temperature,
        dtype=getattr(torch, learner.dtype),
        has_values=has_values,
    )
    if learner.compile:
        compile_layers(network)
    return network


def device_of(name: str) -> torch.device:
    """`auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
