"""`streamrl check`: the resolved configuration, and where each value came from."""

import argparse

from streamrl.config import render
from streamrl.config.arguments import configuration


def main(arguments: argparse.Namespace) -> int:
    print(render(configuration(arguments)), end="")
    return 0
