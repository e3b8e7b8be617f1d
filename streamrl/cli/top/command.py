"""`streamrl top`: where a run's time goes, what its groups and its generators do, on one screen.

    0    left by q; with --once: printed
    2    the target names no run, or there is no terminal
    130  Ctrl-C

`--once` prints one reading as text, `--once --json` as the record `streamrl.cli.top.snapshot`.
"""

import argparse
import asyncio
import json
import sys

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from streamrl.cli.display.view import newest_sample
from streamrl.cli.top.panels import render
from streamrl.cli.top.reading import RunReader
from streamrl.cli.top.screen import Screen
from streamrl.cli.top.snapshot import RunSnapshot
from streamrl.errors import ConfigError, StreamRLError


def main(arguments: argparse.Namespace) -> int:
    reader = RunReader(arguments.target)
    if arguments.json and not arguments.once:
        raise ConfigError("--json: is for --once")
    if arguments.once:
        _print(asyncio.run(reader.read()), as_json=arguments.json)
        return 0
    if not sys.stdout.isatty():
        raise ConfigError(
            "the output is no terminal: --once prints one reading, `streamrl watch` prints lines"
        )
    asyncio.run(_show(reader, arguments.interval))
    return 0


def _print(snapshot: RunSnapshot, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(snapshot, str_keys=True)))
        return
    console = Console(highlight=False)
    console.print(render(snapshot, console.width))


async def _show(reader: RunReader, interval_s: float) -> None:
    """Waits until a person leaves; a run that cannot be read any more is shown as that."""
    shown: RenderableType | RunSnapshot = Text("reading the run")

    async def read() -> None:
        nonlocal shown
        try:
            shown = await reader.read()
        except (StreamRLError, OSError) as error:
            shown = Text(str(error), style="red")

    def draw(width: int) -> RenderableType:
        if not isinstance(shown, RunSnapshot):
            return shown
        folder = None if reader.config is None else reader.config.run.path
        return render(shown, width, None if folder is None else newest_sample(folder))

    await Screen(Console(highlight=False), draw).run(read, interval_s)
