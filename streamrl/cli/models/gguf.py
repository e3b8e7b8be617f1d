"""A GGUF file as a Hugging Face folder: config, safetensors in float32, tokenizer, chat template.

transformers reads the file (extra: gguf). Its quantized weights become ordinary numbers, with the
error that quantization made.
"""

import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from streamrl.errors import ConfigError


def convert(file: Path, folder: Path) -> None:
    """Write the files of the model into the folder.

    Raises:
        ConfigError: gguf is not installed, or transformers cannot read the file.
    """
    disable_progress_bar()
    place, name = str(file.parent), file.name
    try:
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    except ImportError as error:
        raise ConfigError(
            "MODEL: reading GGUF needs gguf and accelerate: pip install 'streamrl[gguf]'"
        ) from error
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise ConfigError(f"MODEL: {file} cannot be read: {error}") from error
    save_file(_distinct(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    # The weights that are saved are not quantized, and nothing else of it is the reader's matter.
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _distinct(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor once, by its first name: safetensors holds no tied weights."""
    first = {tensor.data_ptr(): name for name, tensor in reversed(list(tensors.items()))}
    return {name: tensors[name].contiguous() for name in tensors if name in set(first.values())}
