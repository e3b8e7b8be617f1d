"""A run without a last step, which a script ends when it has seen enough of it: however fast the
machine is, the run is there for what the script still means to do to it."""

import asyncio

from streamrl.cli.buffer.audit import RunAudit, audit_run
from streamrl.cli.processes.restarts import Child
from streamrl.config import RunConfig
from streamrl.errors import StreamRLError
from streamrl.tracking.jsonl import TRAINED_FILE, read_last
from tests.research.progress import Progress

_STEPS = 10**9


def endless(config: RunConfig, num_faults: int) -> RunConfig:
    """Without a last step, and with a restart for each fault in the budget of every process."""
    max_restarts = config.run.max_restarts + num_faults
    run = {"max_steps": _STEPS, "max_restarts": max_restarts, "evaluate": False}
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


async def end(learner: Child, progress: Progress, within_s: float) -> None:
    """Ask the learner to end. Waits until it has.

    Raises:
        StreamRLError: it has not ended in time.
    """
    process = await progress.until_running(learner)
    learner.stop()
    try:
        await asyncio.wait_for(process.wait(), within_s)
    except TimeoutError as error:
        raise StreamRLError(f"the learner has not ended within {within_s:g} s") from error


def audit(config: RunConfig) -> RunAudit:
    """Of a run that was to end with the step that it has reached."""
    last_step = read_last(config.run.path / TRAINED_FILE).get("step", 0)
    ended = config.run.model_copy(update={"max_steps": last_step})
    try:
        return audit_run(config.run.path, complete=config.model_copy(update={"run": ended}))
    except StreamRLError as error:
        return RunAudit((), (str(error),))
