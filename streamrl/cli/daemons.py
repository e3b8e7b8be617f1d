"""`streamrl buffer | generator | learner`: one daemon in this process, in any order, anywhere.

The daemons stand on floors above this one and are imported by name.
"""

import argparse
import importlib
import os
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

from streamrl import service
from streamrl.cli.arguments import configuration
from streamrl.config import RunConfig, to_yaml


def buffer(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    return _run("buffers.daemon", "buffer", config)


def generator(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    name = arguments.id or f"generator-{uuid.uuid4().hex[:6]}"
    return _run("actors.daemon", name, config, generator_id=name)


def learner(arguments: argparse.Namespace) -> int:
    overrides = ["run.resume=auto"] if arguments.resume else []
    arguments.overrides = [*arguments.overrides, *overrides]
    config = configuration(arguments).config
    return _run("learners.daemon", "learner", config)


def _run(module: str, role: str, config: RunConfig, **extra: str) -> int:
    # Idle OpenMP threads that spin would take the cores other daemons of this machine compute on.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config.run.path.mkdir(parents=True, exist_ok=True)
    resolved = config.run.path / "config.yaml"
    if not resolved.exists():
        resolved.write_text(to_yaml(config))
    daemon: Callable[..., Awaitable[None]] = importlib.import_module(module).main
    log_file = config.run.path / "logs" / f"{role}.log"
    return service.run(partial(daemon, config, **extra), role=role, log_file=log_file)
