"""Checks that vLLM's attention kernels for CPUs can serve a model, so that it is refused at the
start.

Without this check vLLM's processes would crash during warm-up or at the first request.
"""

from actors.engines.model import ModelFacts
from actors.engines.vllm.plugin import request_amx
from streamrl.config import RunConfig
from streamrl.errors import ConfigError

# The widths that vLLM 0.32 names (CPUAttentionBackend.get_supported_head_sizes), and 48, which also
# works.
HEAD_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def require_servable(config: RunConfig, facts: ModelFacts) -> None:
    """
    Raises:
        ConfigError: vLLM on this machine's CPU cannot serve the model.
    """
    if facts.head_width is not None and facts.head_width not in HEAD_WIDTHS:
        raise ConfigError(
            f"model.path: {config.model.path} has attention heads of width {facts.head_width}, and "
            f"on a CPU vLLM serves those of {', '.join(map(str, HEAD_WIDTHS))} only: take another "
            "model, or generator.engine hf"
        )
    if facts.has_experts:
        raise ConfigError(
            f"model.path: {config.model.path} has experts, and on a CPU vLLM brings only their "
            "first weights into the order that its kernels read, no later ones: use "
            "generator.engine hf"
        )
    if config.generator.dtype == "bfloat16" and not request_amx():
        raise ConfigError(
            "generator.dtype: was bfloat16, for which vLLM uses this CPU's AMX tiles, and the "
            "operating system does not grant them: use generator.dtype float32"
        )
