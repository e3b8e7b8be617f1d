"""A folder that transformers, vLLM and SGLang load: configuration, tokenizer and weights.

Invariant: weights are written under the names that public models have, from tensors in host memory
alone, so that the model that trains is not touched.

Copied as they are: generation settings, since transformers refuses to write some that it reads,
such as a temperature without `do_sample`; the tokenizer, whose class transformers 5 writes by a
name that 4 and llama.cpp do not know; and what vLLM and transformers need to load a model that sees
images.
"""

import copy
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from streamrl.config.model import ModelSettings
from streamrl.vision.families import auto_model, has_vision

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)


def copy_files(model: str, folder: Path, names: Iterable[str]) -> None:
    """Those that the folder or hub name `model` has, byte by byte; OSError if one cannot be
    written."""
    for name in names:
        found = cached_file(
            model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            shutil.copyfile(found, folder / name)


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> frozenset[str]:
    """The parameters that stay float32 where the model computes in `dtype`: those of modules that
    transformers leaves in float32 where it loads the model, such as the gates of some routers,
    whose code counts on that. Not so norms, whose output would no longer fit what follows, the
    embeddings, which are read outside their modules, and a module of which transformers leaves a
    part alone, since a module is sharded in one dtype. Names as without an adapter.
    """
    # Patterns that transformers searches for in names.
    patterns = [part.replace("*", ".*") for part in model._get_dtype_plan(dtype)]
    kept = re.compile("|".join(patterns) or "(?!)")
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    names: set[str] = set()
    for prefix, module in model.named_modules():
        own = [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
        plain = [without_adapter_layer(name) for name in own]
        is_other = module in embeddings or "norm" in prefix.rpartition(".")[2].lower()
        if own and not is_other and all(map(kept.search, plain)):
            names.update(plain)
    return frozenset(names)


def without_adapter_layer(name: str) -> str:
    """A parameter's name in the model without an adapter."""
    return name.replace(".base_layer.", ".")


def save_model(
    folder: Path,
    model_config: PretrainedConfig,
    settings: ModelSettings,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
) -> None:
    """Write the folder; without weights, what describes the model alone.

    Args:
        settings: where the tokenizer and the generation settings come from.
        weights: by name, whole, on the CPU.
        dtype: of what is trained and not `kept_in_float32`; the rest, such as a router's
            correction, is small and exact.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    model = make_skeleton(model_config, settings, dtype)
    if weights:
        named = model.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in named if parameter.requires_grad}
        narrow = trained - kept_in_float32(model, dtype)
        cast = {n: t.to(dtype) if n in narrow else t for n, t in weights.items()}
        model.save_pretrained(folder, state_dict=cast, max_shard_size=max_shard_size)
    else:
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    _save_tokenizer(folder, settings)
    copy_files(settings.path, folder, (GENERATION_CONFIG_NAME,))
    if has_vision(model_config):
        copy_files(settings.path, folder, PROCESSOR_FILES)


def make_skeleton(
    model_config: PretrainedConfig, settings: ModelSettings, dtype: torch.dtype
) -> PreTrainedModel:
    """The model on the device `meta`: names and shapes, and no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_model(model_config).from_config(
            copy.deepcopy(model_config), dtype=dtype, trust_remote_code=settings.trust_remote_code
        )
    return model


def _save_tokenizer(folder: Path, settings: ModelSettings) -> None:
    trust = settings.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_path, trust_remote_code=trust)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The tokenizers library has no class of its own for a file that it cannot write.
        if type(error) is Exception:
            raise OSError(str(error)) from error
        raise
    # Over what was written; of a tokenizer without these files that stays.
    copy_files(settings.tokenizer_path, folder, TOKENIZER_FILES)
