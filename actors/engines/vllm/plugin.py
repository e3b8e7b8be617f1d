"""vLLM's door to StreamRL: the entry point `vllm.general_plugins` of pyproject.toml.

vLLM calls `register` in each of its processes, so the weight receiver is known in the workers. It
may be called more than once, and imports nothing heavy: the receiver is loaded when it is used.

Invariant: vLLM's processes end with the generator that started them, however that ended. vLLM
itself leaves its engine core running when its owner is killed.
"""

import multiprocessing
import os
import threading

BACKEND = "streamrl"
# Set by the generator, so that vLLM's processes of other programs are left as they are.
OWNED_VARIABLE = "STREAMRL_OWNS_VLLM"


def register() -> None:
    """Make `WeightTransferConfig(backend="streamrl")` known to vLLM."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(
        BACKEND, "actors.engines.vllm.receiver", "WeightReceiver"
    )
    if multiprocessing.parent_process() and OWNED_VARIABLE in os.environ:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    """Waits for the parent's end, which the operating system shows by closing a pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "register() has looked"
    parent.join()
    os._exit(1)
