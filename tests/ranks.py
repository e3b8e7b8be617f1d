"""Ranks of a learner as processes on this machine, joined by gloo over a file."""

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Two ranks that compile a layer take both cores for a minute, and other tests take them too.
DEADLINE_S = 300.0
# The ranks are forks of one process that has made the long imports.
IMPORTS = ["torch.distributed.fsdp", "learners.trainer"]


def run_ranks(work: Callable[..., Any], num_ranks: int, folder: Path, *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returned on each rank, one thread each; `work` is a module's."""
    multiprocessing.set_forkserver_preload(IMPORTS)
    context = mp.start_processes(
        _run, (work, num_ranks, folder, arguments), num_ranks, join=False, start_method="forkserver"
    )
    give_up = time.monotonic() + DEADLINE_S
    try:
        # Ends when all ranks have, and raises what one raised.
        while not context.join(timeout=1.0):
            assert time.monotonic() < give_up, f"the ranks did not end within {DEADLINE_S:.0f} s"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _run(
    rank: int, work: Callable[..., Any], num_ranks: int, folder: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), num_ranks)
    timeout = timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    torch.save(work(*arguments), folder / f"{rank}.pt")
    dist.destroy_process_group()
