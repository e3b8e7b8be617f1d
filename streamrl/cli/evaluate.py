"""`streamrl evaluate`: the greedy score of a checkpoint on held-out prompts.

Prints one JSON line and writes it to `evaluation.json` in the run folder.
"""

import argparse
import asyncio
import json
from pathlib import Path

from actors.evaluation import evaluate, newest_model
from streamrl.config.arguments import configuration


def main(arguments: argparse.Namespace) -> int:
    config = configuration(arguments).config
    model = Path(arguments.checkpoint) if arguments.checkpoint else newest_model(config)
    line = json.dumps(asyncio.run(evaluate(config, model)))
    print(line)
    config.run.path.mkdir(parents=True, exist_ok=True)
    (config.run.path / "evaluation.json").write_text(line + "\n")
    return 0
