"""Installs packages with uv, from the indexes that pip is configured for:
`install.py PYTHON ARGUMENT...`.

uv takes half a minute instead of pip's three, and caches downloads for the next clone, but does not
read pip's settings. If uv is not available or fails, pip installs. The Makefile calls this script
with the Python of `.venv`, whose pip fetches uv.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
INDEXES = ("index-url", "extra-index-url", "find-links")


def settings(listing: str) -> dict[str, str]:
    """Parse the output of `pip config list` into settings by name. As in pip, the later of the
    sections global, install and environment takes precedence."""
    pairs = [line.partition("=") for line in listing.splitlines() if "=" in line]
    return {
        name.removeprefix(section): ast.literal_eval(value)
        for section in ("global.", "install.", ":env:.")
        for name, _, value in pairs
        if name.startswith(section)
    }


def flags(configured: Mapping[str, str]) -> Iterator[str]:
    """Yield uv's flags for pip's settings; pip treats all indexes alike, so uv must, too."""
    yield "--index-strategy=unsafe-best-match"
    for name in INDEXES:
        yield from (f"--{name}={place}" for place in configured.get(name, "").split())


def install(python: str, arguments: Sequence[str]) -> int:
    """Install with uv, or else with pip; returns the exit code of the one that ran last."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pinned = ["-c", str(ROOT / "constraints.txt"), "uv"]
        subprocess.run([*PIP, "install", "--quiet", *pinned], check=False)
    if uv.exists():
        listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True)
        indexes = flags(settings(listing.stdout))
        command = [uv, "pip", "install", "--quiet", "--python", python, *indexes, *arguments]
        if subprocess.run(command).returncode == 0:
            return 0
        print("uv could not; pip tries", file=sys.stderr)
    return subprocess.run([*PIP, "--python", python, "install", "--quiet", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1], sys.argv[2:]))
