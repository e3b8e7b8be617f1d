"""A folder that `streamrl export` has written, uploaded to a repository of the Hugging Face hub."""

from pathlib import Path

import httpx2
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from streamrl.errors import ConfigError, TransportError


def require_token() -> None:
    """
    Raises:
        ConfigError: there is none, so nothing could be uploaded.
    """
    if not get_token():
        raise ConfigError("--push: needs a token of the hub: set HF_TOKEN, or run `hf auth login`")


def push(folder: Path, repository: str, *, is_public: bool) -> str:
    """Upload the folder as one commit; the repository is made if it is not there. Its address.

    Raises:
        ConfigError: the name is no repository's, or the hub refuses.
        TransportError: the hub does not answer.
    """
    hub = HfApi()
    try:
        hub.create_repo(repository, private=not is_public, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"StreamRL: {folder.name}"
        )
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"--push: {repository}: {error}") from error
    except (httpx2.HTTPError, OSError) as error:
        raise TransportError(f"--push: the hub does not answer: {error}") from error
    return str(commit.repo_url)
