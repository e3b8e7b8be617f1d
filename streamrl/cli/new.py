"""`streamrl new`: copies a recipe to a new folder.

Recipes are in the package; in a clone of the repository they are in `configs/recipes`.
"""

import argparse
import shutil
from pathlib import Path

import streamrl
from streamrl.errors import ConfigError, did_you_mean

_PACKAGE = Path(streamrl.__file__).parent
_PLACES = (_PACKAGE / "recipes", _PACKAGE.parent / "configs" / "recipes")


def main(arguments: argparse.Namespace) -> int:
    name, known = arguments.recipe or "", recipes()
    if not name or arguments.folder is None:
        raise ConfigError(f"give FOLDER and --recipe; {did_you_mean(name, known)}")
    if name not in known:
        raise ConfigError(f"--recipe: was {name!r}; {did_you_mean(name, known)}")
    folder = Path(arguments.folder)
    try:
        shutil.copytree(known[name], folder, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError as error:
        raise ConfigError(f"{folder} exists already; name a new folder") from error
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from error
    print((folder / "README.md").read_text(encoding="utf-8"), end="")
    return 0


def recipes() -> dict[str, Path]:
    """The folder of each recipe, by name."""
    folders = (path for place in _PLACES if place.is_dir() for path in sorted(place.iterdir()))
    return {path.name: path for path in folders if (path / "README.md").is_file()}
