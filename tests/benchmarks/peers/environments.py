"""Environments of the peers: each has a folder of its own with pinned versions from PyPI.

    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.peers.environments NAME... [--folder FOLDER]

Makes those that are missing and prints the Python of each. verl is installed without what it
depends on: the comparisons load single files of it (see `verl_functions`). prime-rl is not on PyPI.
Called by: the comparisons, with the folder they are given.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".venv-peers"
PACKAGES: Mapping[str, Sequence[str]] = {
    "trl": ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "msgspec"),
    "transfer-queue": ("TransferQueue==0.1.11", "torch==2.13.0", "ray"),
    "verl": ("--no-deps", "verl==0.6.0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=tuple(PACKAGES), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    for name in arguments.names:
        print(name, environment(name, arguments.folder), flush=True)


def environment(name: str, folder: Path = FOLDER) -> Path:
    """The Python of the peer's environment, which is made if it is not complete.

    Waits for pip.

    Raises:
        SystemExit: a package could not be installed; the message is pip's.
    """
    home = folder / name
    python, stamp = home / "bin" / "python", home / "complete"
    wanted = "\n".join(PACKAGES[name])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    _call(sys.executable, "-m", "venv", "--clear", str(home))
    _call(sys.executable, str(ROOT / "deploy" / "install.py"), str(python), *PACKAGES[name])
    stamp.write_text(wanted)
    return python


def site_packages(python: Path) -> Path:
    """The folder of an environment that has its packages."""
    return next((python.parents[1] / "lib").glob("python3*/site-packages"))


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    main()
