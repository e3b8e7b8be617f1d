"""`streamrl make-model`: the model of `model.recipe`, unless there is one at `model.path`."""

import argparse
import logging
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from actors.make_model import make_model
from streamrl.config import RunConfig


def main(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    disable_progress_bar()
    config: RunConfig = arguments.run_config
    if Path(config.model.path).exists():
        print(f"{config.model.path} exists already")
        return 0
    make_model(config)
    return 0
