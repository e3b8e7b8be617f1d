"""What was probably meant by a path that is not there, as the closing words of a sentence."""

from difflib import get_close_matches
from pathlib import Path

RESOLVED_FILE = "config.yaml"
"""A run's configuration, in its folder."""


def similar_file(path: Path) -> str:
    """The configuration of a like name beside the path or in configs/; "" without one."""
    return _similar(path.stem, {file.stem: file for file in _glob("configs", path, "*.yaml")})


def similar_run(folder: Path) -> str:
    """The run of a like name beside the folder or in runs/; "" without one."""
    files = _glob("runs", folder, f"*/{RESOLVED_FILE}")
    return _similar(folder.name, {file.parent.name: file.parent for file in files})


def _glob(usual: str, path: Path, pattern: str) -> list[Path]:
    return [file for folder in (Path(usual), path.parent) for file in folder.glob(pattern)]


def _similar(name: str, paths: dict[str, Path]) -> str:
    close = get_close_matches(name, paths, n=1)
    return f"; did you mean '{paths[close[0]]}'?" if close else ""
