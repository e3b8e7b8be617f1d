"""Starts the ranks of a learner on this machine; on several machines `streamrl torchrun` does it.

Every rank gets a signal; the first rank decides what to do and ends the others.

Invariant: when one rank fails all end, by themselves or GRACE_S later; the exit code and message
come from a rank that says why. Waits for the ranks to end; they end by themselves if this process
is gone.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from learners.executor import liveness
from streamrl.config import RunConfig
from streamrl.config.learner import LearnerSettings
from streamrl.errors import EXIT_UNREACHABLE, ErrorPipe, ErrorRecord, StreamRLError, error_of
from streamrl.placement.hosts import num_cores, num_threads
from streamrl.service import force_s
from streamrl.shutdown import Shutdown

HOST = "127.0.0.1"
GRACE_S = liveness.GRACE_S + 5.0
LATE_S = 0.5
_TIMEOUT = timedelta(minutes=5)


def is_starter(settings: LearnerSettings) -> bool:
    """Whether this process is not a rank itself and has to start the ranks."""
    return settings.num_ranks > 1 and "RANK" not in os.environ


async def start_ranks(config: RunConfig, shutdown: Shutdown) -> None:
    """Start the ranks, with this process's command line, and wait for them.

    Raises:
        StreamRLError: a rank failed; with the kind and message of its error.
    """
    num_ranks = config.learner.num_ranks
    store = TCPStore(HOST, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    with ExitStack() as stack:
        pipes = [stack.enter_context(ErrorPipe()) for _ in range(num_ranks)]
        ranks = [await _start(rank, num_ranks, store.port, pipe) for rank, pipe in enumerate(pipes)]
        # Each rank takes up to its own limit, and this process ends after them.
        shutdown.allow(2 * LATE_S)
        forwarding = asyncio.create_task(_forward(shutdown, ranks, force_s(config) + LATE_S))
        try:
            await _wait(ranks, config.learner.rank_deadline_s + GRACE_S)
        finally:
            forwarding.cancel()
        codes = {rank: process.returncode or 0 for rank, process in enumerate(ranks)}
        if shutdown.requested.is_set():
            # A signal may come before a rank handles any; then nothing is lost.
            codes = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
        if any(codes.values()):
            raise failure(codes, [pipe.read() for pipe in pipes])


async def _start(rank: int, num_ranks: int, port: int, pipe: ErrorPipe) -> Process:
    threads = num_threads(otherwise=num_cores())
    environment = {
        **os.environ,
        **pipe.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        # The store is here, not in the first rank.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(max(1, threads // num_ranks)),
    }
    # In its own session, so that Ctrl-C in the terminal signals this process only.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *sys.argv),
        start_new_session=True,
        env=environment,
        pass_fds=(pipe.descriptor,),
    )


async def _forward(shutdown: Shutdown, ranks: Sequence[Process], within_s: float) -> None:
    """Waits for a signal and passes it to the ranks; kills those still running after `within_s`."""
    await shutdown.requested.wait()
    _signal(ranks, signal.SIGTERM)
    await asyncio.sleep(within_s)
    _signal(ranks, signal.SIGKILL)


def _signal(ranks: Sequence[Process], number: signal.Signals) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):
            rank.send_signal(number)


async def _wait(ranks: Sequence[Process], deadline_s: float) -> None:
    """Waits until all ranks have ended; once one fails, the others are killed after
    `deadline_s`."""
    tasks = {asyncio.create_task(rank.wait()) for rank in ranks}
    running = tasks
    while running and not any(task.result() for task in tasks - running):
        _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    if running:
        await asyncio.wait(running, timeout=deadline_s)
    _signal(ranks, signal.SIGKILL)
    await asyncio.gather(*tasks)


def failure(codes: Mapping[int, int], records: Sequence[ErrorRecord | None]) -> StreamRLError:
    """The error of a rank that failed by itself rather than because of another, if one said why;
    `codes` are the exit codes by rank."""
    said = [record for record in records if record is not None]
    own = [record for record in said if record.exit_code != EXIT_UNREACHABLE]
    for record in (*own, *said):
        return error_of(record.exit_code, record.sentence)
    rank, code = next((rank, code) for rank, code in codes.items() if code)
    return StreamRLError(f"rank {rank} of the learner ended with exit code {code}")
