"""`streamrl status RUN --probe ROLE`: the probe of Docker, Kubernetes or a person for one daemon.

    0  healthy        1  not, and why: one sentence

It says nothing of the others. A buffer answers by itself; a generator is healthy if its buffer has
heard from it in time; a learner writes `learner.json` every second, whatever it computes. Imports
no torch, and waits for the buffer a few seconds at most.
"""

import argparse
import asyncio

from streamrl.cli.buffer.target import read_folder, read_stats
from streamrl.cli.display.generators import generator_rows
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.run_folder import find_config
from streamrl.types import BufferStats
from streamrl.types.ranges import named_after_host


def probe(arguments: argparse.Namespace) -> int:
    """The exit code."""
    config = find_config(arguments.target)
    fault = asyncio.run(_fault(config, arguments.probe, arguments.id))
    print(fault or "healthy")
    return 1 if fault else 0


async def _fault(config: RunConfig, role: str, given: str | None) -> str:
    """What is wrong, as a sentence, or "".

    Raises:
        ConfigError: a generator without an id.
    """
    match role:
        case "learner":
            return _of_learner(config)
        case "generator" if given is None:
            raise ConfigError("--id: is required for a generator and was not given")
        case "generator":
            stats, fault = await read_stats(config)
            return fault if stats is None else _of_generator(stats, named_after_host(str(given)))
        case _:
            return (await read_stats(config))[1]


def _of_generator(stats: BufferStats, generator_id: str) -> str:
    states = {row.id: row.state for row in generator_rows(stats)}
    if generator_id not in states:
        return f"{generator_id} does not report to the buffer"
    return f"{generator_id} is silent" if "silent" in states[generator_id] else ""


def _of_learner(config: RunConfig) -> str:
    reading = read_folder(config)
    if reading.learner is None:
        return f"no learner has reported in {config.run.path}"
    if reading.is_learner_reporting:
        return ""
    return f"the learner last reported {reading.learner_age_s:.0f} s ago"
