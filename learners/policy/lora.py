"""LoRA: a frozen model with an adapter of low rank on some of its linear layers, by peft.

    weight = base + alpha / rank * B A        (Hu et al., arXiv 2106.09685)

Invariant: only A and B are trained, and what leaves the learner has the names and shapes that
transformers gives the model without an adapter. The model with its adapter switched off is the
policy of `model.path`, so it is the reference policy, too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import dropout
from transformers import PreTrainedModel

from learners.parallel.mesh import OnDemand, full
from learners.policy.hugging_face import without_adapter_layer
from learners.policy.sharding import master_of
from streamrl.config.learner import LoraSettings
from streamrl.config.model import ModelSettings
from streamrl.errors import ConfigError, did_you_mean
from streamrl.extras import missing
from streamrl.vision.families import load_pretrained
from streamrl.weights import lora

ADAPTER = "default"
WEIGHTS_FILE = "adapter_model.safetensors"

# What a tensor that may be sharded becomes: `full`, or `described`.
Whole = Callable[[torch.Tensor], torch.Tensor]


def add_adapter(model: PreTrainedModel, settings: LoraSettings, *, is_filled: bool = True) -> None:
    """Freeze the model and put an adapter of zeros on the layers that `targets` names; unless
    `is_filled`, on the meta device, for which no random number is drawn.

    Raises:
        ConfigError: peft is not installed, or no layer, or none that peft can adapt, is named.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise missing("learner.lora:", error) from error
    _require_layers(model, settings)
    try:
        inject_adapter_in_model(
            peft_config(settings), model, adapter_name=ADAPTER, low_cpu_mem_usage=not is_filled
        )
    except ValueError as error:
        raise ConfigError(f"learner.lora.targets: {error}") from error
    _require_matrices(model)
    for layer in adapted_layers(model).values():
        layer.lora_dropout[ADAPTER] = GradientDropout(settings.dropout)


def _require_layers(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Each target is a layer of the decoder: peft passes over those that it does not find."""
    if settings.targets == "all-linear":
        return
    heads = (model.get_output_embeddings(), model.get_input_embeddings())
    inside = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if module not in heads and getattr(module, "weight", torch.empty(0)).ndim == 2
    }
    for target in settings.targets:
        if target not in inside:
            raise ConfigError(
                f"learner.lora.targets: was {target!r}, which is no linear layer of the decoder; "
                f"{did_you_mean(target, inside)}"
            )


def _require_matrices(model: PreTrainedModel) -> None:
    """Each adapted layer is one matrix: peft takes the experts of a layer, which are several in one
    tensor, with `all-linear` and by the names that their matrices once had, and embeddings."""
    is_matrix = {
        name: ADAPTER in layer.lora_A
        and getattr(layer.get_base_layer(), "weight", torch.empty(0)).ndim == 2
        for name, layer in adapted_layers(model).items()
    }
    if all(is_matrix.values()):
        return
    other = next(name for name, is_one in is_matrix.items() if not is_one)
    fitting = {name.rpartition(".")[2] for name, is_one in is_matrix.items() if is_one}
    allowed = f", such as [{', '.join(sorted(fitting))}]" if fitting else ""
    raise ConfigError(
        f"learner.lora.targets: would adapt {other}, which is no linear layer and whose adapter no "
        f"generator could be sent: name linear layers{allowed}"
    )


class GradientDropout(torch.nn.Module):
    """Dropout in passes with gradient alone, whatever mode the model is in."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.p = probability

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return dropout(inputs, self.p, training=torch.is_grad_enabled() and self.p > 0)


def peft_config(settings: LoraSettings) -> Any:
    from peft import LoraConfig

    targets = settings.targets
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        bias="none",
        task_type="CAUSAL_LM",
    )


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """The policy of `model.path` meanwhile; for passes without gradient."""
    layers = list(adapted_layers(model).values())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    # peft freezes them; FSDP keeps what it finds in its first pass, which may be this one.
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapted_layers(model: PreTrainedModel) -> dict[str, Any]:
    """peft's layers, by the name that transformers gives them."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and hasattr(module, "base_layer")
    }


def with_adapter(model: PreTrainedModel, whole: Whole = full) -> OnDemand:
    """The parameters that the model has without an adapter, with the adapter in them, whole.

    A merged matrix exists while its caller holds it; all ranks read the same ones, if `full`.
    """
    factors = adapter_factors(model, whole)
    parameters = {
        without_adapter_layer(name): master_of(parameter)
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }

    @torch.no_grad()
    def merged(name: str) -> torch.Tensor:
        parameter = whole(parameters[name])
        # A frozen one may have no float32 master, see `narrow_frozen`.
        parameter = parameter.to(torch.promote_types(parameter.dtype, torch.float32))
        if name + lora.LEFT not in factors:
            return parameter
        left, right = factors[name + lora.LEFT], factors[name + lora.RIGHT]
        return torch.addmm(parameter, left.to(parameter.dtype), right.to(parameter.dtype))

    return OnDemand(parameters, merged)


def adapter_factors(model: PreTrainedModel, whole: Whole = full) -> OnDemand:
    """The adapter as the weight channel sends it, whole, see `streamrl.weights.lora`."""
    layers, halves = adapted_layers(model), (lora.LEFT, lora.RIGHT)

    @torch.no_grad()
    def factor(name: str) -> torch.Tensor:
        layer = layers[lora.matrix_of(name).removesuffix(".weight")]
        a = whole(master_of(layer.lora_A[ADAPTER].weight))
        b = whole(master_of(layer.lora_B[ADAPTER].weight))
        # A Conv1D has its matrix the other way round.
        left, right = (a.T, b.T) if layer.fan_in_fan_out else (b, a)
        scaling: float = layer.scaling[ADAPTER]
        return scaling * left if name.endswith(lora.LEFT) else right

    return OnDemand((f"{name}.weight{half}" for name in layers for half in halves), factor)


def merged_weights(
    settings: LoraSettings, base: ModelSettings, adapter: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model of `base` with the adapter, whole, in it, float32, on the CPU. Draws no random
    number, since a learner saves while it trains.

    Raises:
        OSError: the base model cannot be read, now.
        ConfigError: the adapter has no place in it.
    """
    trust = base.trust_remote_code
    model = load_pretrained(base.path, dtype=torch.float32, trust_remote_code=trust)
    add_adapter(model, settings, is_filled=False)
    filled = {name: tensor.float() for name, tensor in adapter.items()}
    model.load_state_dict(filled, strict=False, assign=True)
    others = {name: tensor for name, tensor in adapter.items() if ".lora_" not in name}
    return {**others, **with_adapter(model)}


def save_adapter(
    settings: LoraSettings, base: str, adapter: Mapping[str, torch.Tensor], folder: Path
) -> None:
    """A folder that `PeftModel.from_pretrained` and vLLM load beside the model at `base`."""
    config = peft_config(settings)
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor.contiguous()
        for name, tensor in adapter.items()
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
