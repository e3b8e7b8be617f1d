"""The ranks of a learner on this machine, as processes: what `streamrl torchrun` is on several.

Every rank is told of a signal; the first one decides, and ends the others.

Invariant: when a rank fails all end, by themselves or GRACE_S later, and the exit code and the
sentence are those of a rank that says why. Waits for the ranks to end; they end by themselves when
this process is gone.
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
    """Whether this process is none of the ranks, and has to start them."""
    return settings.num_ranks > 1 and "RANK" not in os.environ


async def start_ranks(config: RunConfig, shutdown: Shutdown) -> None:
    """Start the ranks, with this process's command line, and wait for them.

    Raises:
        StreamRLError: a rank failed; of the failure's kind, with its sentence.
    """
    num_ranks = config.learner.num_ranks
    store = TCPStore(HOST, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    with ExitStack() as stack:
        pipes = [stack.enter_context(ErrorPipe()) for _ in range(num_ranks)]
        ranks = [await _start(rank, num_ranks, store.port, pipe) for rank, pipe in enumerate(pipes)]
        # It ends after the ranks, of which each has this time.
        shutdown.allow(2 * LATE_S)
        forwarding = asyncio.create_task(_forward(shutdown, ranks, force_s(config) + LATE_S))
        try:
            await _wait(ranks, config.learner.rank_deadline_s + GRACE_S)
        finally:
            forwarding.cancel()
        codes = {rank: process.returncode or 0 for rank, process in enumerate(ranks)}
        if shutdown.requested.is_set():
            # Where a signal comes before a rank listens to any, there is nothing to be lost.
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
    # In a session of its own, so that Ctrl-C in the terminal signals this process only.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *sys.argv),
        start_new_session=True,
        env=environment,
        pass_fds=(pipe.descriptor,),
    )


async def _forward(shutdown: Shutdown, ranks: Sequence[Process], within_s: float) -> None:
    """Waits for a signal, which the ranks get; those that still run after `within_s` are killed."""
    await shutdown.requested.wait()
    _signal(ranks, signal.SIGTERM)
    await asyncio.sleep(within_s)
    _signal(ranks, signal.SIGKILL)


def _signal(ranks: Sequence[Process], number: signal.Signals) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):
            rank.send_signal(number)


async def _wait(ranks: Sequence[Process], deadline_s: float) -> None:
    """Until all have ended; once one has failed the others are killed after `deadline_s`."""
    tasks = {asyncio.create_task(rank.wait()) for rank in ranks}
    running = tasks
    while running and not any(task.result() for task in tasks - running):
        _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    if running:
        await asyncio.wait(running, timeout=deadline_s)
    _signal(ranks, signal.SIGKILL)
    await asyncio.gather(*tasks)


def failure(codes: Mapping[int, int], records: Sequence[ErrorRecord | None]) -> StreamRLError:
    """That of a rank which did not fail because of another one, if it said why; `codes` are the
    exit codes by rank."""
    said = [record for record in records if record is not None]
    own = [record for record in said if record.exit_code != EXIT_UNREACHABLE]
    for record in (*own, *said):
        return error_of(record.exit_code, record.sentence)
    rank, code = next((rank, code) for rank, code in codes.items() if code)
    return StreamRLError(f"rank {rank} of the learner ended with exit code {code}")
