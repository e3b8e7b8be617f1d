"""`streamrl export`: the policy of a checkpoint as a Hugging Face folder, in a chosen dtype.

Reads what any number of ranks has saved, and needs no GPU. An adapter is merged into the base at
`model.path`, unless `--adapter` asks for the adapter alone.
Invariant: the folder appears under its name once it is complete.
"""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from learners.checkpoints.contents import MODEL, whole_tensors
from learners.policy.hugging_face import save_model
from learners.policy.lora import merged_weights, save_adapter
from streamrl.checkpoints.find import (
    Checkpoint,
    list_checkpoints,
    newest,
    path_of,
    read_checkpoint,
    require_same_adapter,
    version_of,
)
from streamrl.config.learner import LoraSettings
from streamrl.config.model import ModelSettings
from streamrl.durable_files import new_folder
from streamrl.errors import ConfigError, TransportError
from streamrl.run_folder import find_run


def push(folder: Path, repository: str, *, is_public: bool) -> str:
    """Upload the folder as one commit, creating the repository if needed; returns its address.

    Raises:
        ConfigError: the name is not a repository's, or the hub refuses.
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


def main(arguments: argparse.Namespace) -> int:
    disable_progress_bar()
    if not re.fullmatch(r"\d+(KB|MB|GB|TB)", arguments.max_shard_size):
        raise ConfigError(
            f"--max-shard-size: was {arguments.max_shard_size!r}, and must be a whole number of "
            "KB, MB, GB or TB, such as 500MB"
        )
    if arguments.push and not get_token():
        raise ConfigError("--push: needs a token of the hub: set HF_TOKEN, or run `hf auth login`")
    config = find_run(arguments.folder)
    run = config.run.path
    checkpoint = _newest(run) if arguments.step is None else _of_step(run, arguments.step)
    default = run / "export" / checkpoint.path.name
    folder = Path(arguments.output) if arguments.output else default
    dtype, size = getattr(torch, arguments.dtype), arguments.max_shard_size
    model, lora = config.model, config.learner.lora
    if lora is not None:
        # The run's settings may have changed since.
        alpha = checkpoint.record.get("lora_alpha") or lora.alpha
        lora = lora.model_copy(update={"alpha": alpha})
        require_same_adapter(checkpoint, model, lora)
    if not arguments.adapter:
        export(checkpoint.path, folder, model, lora, dtype, size)
    elif lora is None:
        raise ConfigError("--adapter: the run trains all parameters (learner.lora is not set)")
    else:
        saved = whole_tensors(checkpoint.path, MODEL)
        factors = {name: tensor.to(dtype) for name, tensor in saved.items() if ".lora_" in name}
        with _new_folder(folder) as unfinished:
            save_adapter(lora, model.path, factors, unfinished)
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"{folder}: step {checkpoint.policy_version}, {arguments.dtype}, {num_bytes / 1e6:,.1f} MB"
    )
    if arguments.push:
        print(push(folder, arguments.push, is_public=arguments.public))
    return 0


def export(
    checkpoint: Path,
    folder: Path,
    model: ModelSettings,
    lora: LoraSettings | None,
    dtype: torch.dtype,
    max_shard_size: str,
) -> None:
    """Write the policy of a checkpoint whose files have been compared with its manifest; `model` is
    the run's, the base of an adapter.

    Raises:
        ConfigError: the folder exists already, or cannot be written; the model that an adapter
            belongs to is not there.
    """
    trust = model.trust_remote_code
    exported = ModelSettings(path=str(checkpoint), trust_remote_code=trust)
    described = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust)
    saved = whole_tensors(checkpoint, MODEL)
    if lora is not None:
        try:
            saved = merged_weights(lora, model, saved)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path: no model at {model.path!r}, which the adapter belongs to: {error}"
            ) from error
    with _new_folder(folder) as unfinished:
        save_model(unfinished, described, exported, saved, dtype, max_shard_size)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Raise ConfigError if the folder exists, or cannot be written."""
    if folder.exists():
        raise ConfigError(f"--output: {folder} exists already; name another folder, or remove it")
    try:
        with new_folder(folder) as unfinished:
            yield unfinished
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--output: {folder} cannot be written: {error}") from error


def _newest(run: Path) -> Checkpoint:
    found = newest(run)
    if found is None:
        raise ConfigError(f"{run} has no checkpoint yet")
    for damage in found.damaged:
        print(f"{damage.sentence}; an older one is taken")
    return found


def _of_step(run: Path, step: int) -> Checkpoint:
    path = path_of(run, step)
    if not path.is_dir():
        steps = ", ".join(str(version_of(path)) for path in list_checkpoints(run)) or "none"
        raise ConfigError(f"--step: was {step}, and the checkpoints of {run} are of: {steps}")
    return read_checkpoint(path)
