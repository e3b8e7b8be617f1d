"""vLLM's door to StreamRL: the entry point `vllm.general_plugins` of pyproject.toml.

vLLM calls `register` in each of its processes, so the weight receiver is known in the workers. It
may be called more than once, and imports nothing heavy: the receiver is loaded when it is used.
"""

BACKEND = "streamrl"


def register() -> None:
    """Make `WeightTransferConfig(backend="streamrl")` known to vLLM."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "actors.engines.vllm.receiver", "WeightReceiver"
        )
