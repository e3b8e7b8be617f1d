"""`streamrl keys new`: makes the keys of `buffer.curve`."""

import argparse
from pathlib import Path

from streamrl.curve import make_keys


def main(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    make_keys(folder)
    print(f"{folder}: keys for buffer.curve; machines of generators get all but server.secret")
    return 0
