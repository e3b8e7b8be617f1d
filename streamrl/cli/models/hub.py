"""A model of the Hugging Face hub, downloaded into a folder."""

import shutil
from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from streamrl.errors import ConfigError, TransportError

# Not the same weights again in the formats of other libraries.
_LEFT_OUT = ["*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.pth", "onnx/*", "original/*"]


def download(repository: str, folder: Path) -> None:
    """
    Raises:
        ConfigError: the hub has no such repository, or refuses it.
        TransportError: the hub does not answer.
    """
    try:
        snapshot_download(repository, local_dir=folder, ignore_patterns=_LEFT_OUT)
    except GatedRepoError as error:
        raise ConfigError(
            f"MODEL: {repository} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"MODEL: the hub has no {repository!r}, or it needs HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        raise TransportError(f"MODEL: the hub does not answer: {error}") from error
    except HfHubHTTPError as error:
        raise ConfigError(f"MODEL: {repository}: {error}") from error
    except httpx2.HTTPError as error:
        raise TransportError(f"MODEL: the hub does not answer: {error}") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
