"""StreamRL's plug-in in vLLM's processes: the entry point `vllm.general_plugins`.

vLLM calls `register` in each of its processes, so the workers know the weight receiver. It may be
called more than once, and imports only what vLLM has already imported.

Invariant: vLLM's processes end with the generator that started them, in whatever way it ends; vLLM
itself would leave its engine core running when its owner is killed.
"""

import logging
import multiprocessing
import os
import threading

BACKEND = "streamrl"
# Set by the generator, so that vLLM processes of other programs are not affected.
ERROR_LOG_VARIABLE = "STREAMRL_VLLM_ERROR_LOG"


def register() -> None:
    """Make `WeightTransferConfig(backend="streamrl")` known to vLLM."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(
        BACKEND, "actors.engines.vllm.worker_receiver", "WorkerReceiver"
    )
    request_amx()
    if multiprocessing.parent_process() and (log_file := os.environ.get(ERROR_LOG_VARIABLE)):
        handler = logging.FileHandler(log_file, delay=True)
        handler.setLevel(logging.ERROR)
        logging.getLogger("vllm").addHandler(handler)
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def request_amx() -> bool:
    """Ask the operating system to let this process use AMX tiles; return whether vLLM can run.

    On a CPU with AMX tiles, vLLM's attention in bfloat16 uses them without asking, and the process
    would end with SIGILL.
    """
    import torch

    return not torch.cpu._is_amx_tile_supported() or torch.cpu._init_amx()


def _end_with_parent() -> None:
    """Wait until the parent ends (the operating system then closes a pipe), and end this
    process."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "register() has checked"
    parent.join()
    os._exit(1)
