"""`streamrl get-model`: a Hugging Face folder from a known name, the hub, a folder or a GGUF file.

Invariant: the folder is written beside its place and renamed, so that it is complete or not there.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from streamrl.cli.models.packages import PACKAGED, PackagedModel, packaged_gguf
from streamrl.errors import ConfigError, did_you_mean
from streamrl.model_folder import ModelFolder

_GGUF = ".gguf"
Writer = Callable[[Path], None]


def main(arguments: argparse.Namespace) -> int:
    model: str = arguments.model
    write = writer_of(model)
    folder = Path(arguments.output or Path("models", _name(model)))
    if folder.exists():
        print(f"{folder} exists already: {describe(folder)}")
        return 0
    with _new_folder(folder) as unfinished:
        write(unfinished)
        described = describe(unfinished)
    print(f"{folder}: {described}")
    return 0


def writer_of(model: str) -> Writer:
    """What writes the files of the model into an empty folder.

    Raises:
        ConfigError: nothing has that name.
    """
    path = Path(model)
    if model in PACKAGED:
        return partial(_convert_packaged, PACKAGED[model])
    if path.suffix == _GGUF and path.is_file():
        return partial(_convert, path)
    if path.is_dir():
        return _writer_of_folder(path)
    if path.suffix != _GGUF and model.count("/") == 1 and all(model.split("/")):
        return partial(_download, model)
    raise ConfigError(
        f"MODEL: there is no file, folder or known model {model!r}; "
        f"{did_you_mean(model, PACKAGED)}; a name of the hub has the form OWNER/NAME"
    )


def describe(folder: Path) -> str:
    """
    Raises:
        ConfigError: it is not the folder of a model.
    """
    found = ModelFolder(folder, "MODEL")
    if not (folder / "config.json").is_file() or not found.has_weights:
        raise ConfigError("MODEL: it has no config.json or no weights")
    kind = found.config.get("model_type", "a model of unknown type")
    template = "with a chat template" if _has_chat_template(folder) else "without a chat template"
    return f"{kind}, {found.num_parameters / 1e6:,.1f} M parameters, {template}"


def _writer_of_folder(path: Path) -> Writer:
    """A copy of a model's folder, or the conversion of its only GGUF file."""
    files = sorted(path.glob(f"*{_GGUF}"))
    if (path / "config.json").is_file():
        return partial(_copy, path)
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ConfigError(
            f"MODEL: {path} has no config.json, so it must have one GGUF file; it has {names}"
        )
    return partial(_convert, files[0])


def _copy(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)


def _convert_packaged(model: PackagedModel, folder: Path) -> None:
    with packaged_gguf(model) as file:
        _convert(file, folder)


def _convert(file: Path, folder: Path) -> None:
    from streamrl.cli.models.gguf import convert

    convert(file, folder)


def _download(repository: str, folder: Path) -> None:
    from streamrl.cli.models.hub import download

    download(repository, folder)


def _name(model: str) -> str:
    path = Path(model)
    return path.stem if path.suffix == _GGUF else path.resolve().name


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and "chat_template" in json.loads(file.read_text(encoding="utf-8"))


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write, which gets its name at the end. What a killed command left is removed."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(folder)
    except OSError as error:
        raise ConfigError(f"--output: {folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
