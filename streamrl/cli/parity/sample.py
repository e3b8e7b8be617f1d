"""`streamrl parity sample`: prompts of the run, sampled by its engine, into a file.

`streamrl parity` runs it; by itself it is for an engine in an environment without the learner.
"""

import argparse
import asyncio
from pathlib import Path

from actors.parity import sample
from streamrl import wire
from streamrl.config import RunConfig


def main(arguments: argparse.Namespace) -> int:
    config: RunConfig = arguments.run_config
    samples = asyncio.run(sample(config))
    file = Path(arguments.samples)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(wire.encode(samples))
    return 0
