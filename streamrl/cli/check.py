"""`streamrl check`: the resolved configuration, and where each value came from."""

import argparse

from streamrl.cli.arguments import configuration
from streamrl.config import render


def main(arguments: argparse.Namespace) -> int:
    print(render(configuration(arguments)), end="")
    return 0
