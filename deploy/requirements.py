"""Prints requirements of pyproject.toml: `requirements.py [EXTRA,...] [--without NAME,...]`.

Images install these requirements, which seldom change, in a layer below the package; an image that
does not need torch omits it.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def requirements(extras: Sequence[str], without: Sequence[str]) -> list[str]:
    """Return the requirements of the package and the extras, except the distributions `without`.

    Raises:
        SystemExit: an extra does not exist, or a name of `without` is not a requirement.
    """
    project = tomllib.loads(PROJECT.read_text())["project"]
    known = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in known]:
        sys.exit(f"no extra of pyproject.toml: {', '.join(unknown)}; there are {', '.join(known)}")
    found = [*project["dependencies"], *(line for extra in extras for line in known[extra])]
    if unknown := [name for name in without if name not in map(name_of, found)]:
        sys.exit(f"no requirement of pyproject.toml: {', '.join(unknown)}")
    return [line for line in found if name_of(line) not in without]


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="?", default="", type=_names)
    parser.add_argument("--without", default="", type=_names)
    arguments = parser.parse_args()
    print("\n".join(requirements(arguments.extras, arguments.without)))
