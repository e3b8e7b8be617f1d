"""What takes minutes, root, or packages of the system: `make test-deploy`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.conftest import launch, model

__all__ = ["launch", "model"]
ROOT = Path(__file__).parents[2]


def kept_environment(name: str, *packages: str) -> Path:
    """The virtual environment `.venv-NAME` with the packages, kept between runs of the tests."""
    folder = ROOT / f".venv-{name}"
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        command = [sys.executable, ROOT / "deploy" / "install.py", python, *packages]
        if subprocess.run(command, check=False).returncode:
            pytest.skip(f"{' '.join(packages)} cannot be installed here")
        stamp.touch()
    return folder
