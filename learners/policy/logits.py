"""What a model does between hidden states @ LM head and the softmax: scaling and soft cap.

Transformers does this inside each model's `forward`, which the learner does not call, so the rules
stand here. A family that is missing is found by the comparison at start, see packing_check.py.
Called by: network.py.
"""

from typing import Any

from streamrl.algorithms.logit_transform import LogitTransform


def logit_transform(config: Any, temperature: float) -> LogitTransform:
    """Of the model with this text configuration, when it is sampled at `temperature`."""
    return LogitTransform(temperature=temperature, softcap=_softcap(config), scale=_scale(config))


def _scale(config: Any) -> float:
    match config.model_type:
        case "cohere" | "cohere2" | "cohere2_moe" | "cohere_compass_text":
            scale = config.logit_scale
        case "falcon_h1":
            scale = config.lm_head_multiplier
        case "hyperclovax":
            scale = config.logits_scaling
        case "minicpm3":
            scale = 1.0 / config.logits_scaling
        case "inkling_text":
            scale = 1.0 / config.logits_mup_width_multiplier
        case family if family.startswith("granite"):
            scale = 1.0 / (config.logits_scaling or 1.0)
        case _:
            scale = None
    return 1.0 if scale is None else float(scale)


def _softcap(config: Any) -> float | None:
    match config.model_type:
        case "recurrent_gemma":
            softcap = config.logits_soft_cap
        case "xlstm":
            softcap = config.output_logit_soft_cap
        case _:
            softcap = getattr(config, "final_logit_softcapping", None)
    return float(softcap) if softcap else None
