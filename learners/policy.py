"""A policy: a transformers model that returns the log-probabilities of response tokens.

Invariant: hidden states are gathered at response positions before the LM head, and logits of the
whole batch never exist; temperature and soft cap are those the behavior policy sampled with.
Shapes: R response tokens, H hidden size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from learners import attention
from learners.batch import MicroBatch
from streamrl.algorithms.kl import full_kl
from streamrl.algorithms.logprobs import LogitTransform, TokenLogprobs, token_logprobs
from streamrl.config import RunConfig
from streamrl.errors import ConfigError


class Policy:
    """The model, its precision and its temperature; master weights are float32."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, dtype: torch.dtype) -> None:
        model.set_attn_implementation(attention.NAME)
        self.model = model
        self._device = next(model.parameters()).device
        self._dtype = dtype
        config: Any = model.config.get_text_config()
        softcap = getattr(config, "final_logit_softcapping", None)
        self._transform = LogitTransform(temperature=temperature, softcap=softcap)

    @classmethod
    def from_config(cls, config: RunConfig, path: Path | str | None = None) -> "Policy":
        """The run's policy with the weights at `path`, by default those of `model.path`."""
        learner = config.learner
        name = str(path or config.model.path)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32, trust_remote_code=config.model.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: no model at {name!r}: {error}") from error
        if learner.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        return cls(
            model.to(device_of(learner.device)),  # type: ignore[arg-type]
            temperature=config.generator.temperature,
            dtype=getattr(torch, learner.dtype),
        )

    @property
    def device(self) -> torch.device:
        return self._device

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name, tied ones once."""
        return dict(self.model.named_parameters())

    def hidden_states(self, micro_batch: MicroBatch) -> torch.Tensor:
        """[R, H] in the model's compute dtype: those that predict the response tokens."""
        packing = micro_batch.packing
        decoder: Any = self.model.get_decoder()
        casts = self._dtype != torch.float32
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=casts):
            output = decoder(
                input_ids=micro_batch.token_ids,
                position_ids=packing.positions[None],
                use_cache=False,
                packing=packing,
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden[micro_batch.predictors]

    def logprobs(
        self, micro_batch: MicroBatch, *, with_entropy: bool, hidden: torch.Tensor | None = None
    ) -> TokenLogprobs:
        """Log-probability (and entropy) [R] of each response token, in nats.

        `hidden` is what `hidden_states` returned, if the caller has it.
        """
        head: Any = self.model.get_output_embeddings()
        return token_logprobs(
            self.hidden_states(micro_batch) if hidden is None else hidden,
            head.weight,
            micro_batch.targets,
            bias=getattr(head, "bias", None),
            transform=self._transform,
            with_entropy=with_entropy,
        )

    @torch.no_grad()
    def batch_logprobs(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> torch.Tensor:
        """[R of the whole batch] in nats, on the CPU; `num_tokens` is R."""
        logprobs = torch.zeros(num_tokens)
        for micro_batch in micro_batches:
            computed = self.logprobs(micro_batch, with_entropy=False).logprobs
            logprobs[micro_batch.responses] = computed.float().cpu()
        return logprobs

    def exact_kl(
        self, hidden: torch.Tensor, reference: "Policy", micro_batch: MicroBatch
    ) -> torch.Tensor:
        """[R] KL to the reference over the whole vocabulary, in nats, with gradient."""
        with torch.no_grad():
            reference_hidden = reference.hidden_states(micro_batch)
        head, reference_head = (p.model.get_output_embeddings() for p in (self, reference))
        return full_kl(
            hidden, head.weight, reference_hidden, reference_head.weight, self._transform
        )

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


def device_of(name: str) -> torch.device:
    """`auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
