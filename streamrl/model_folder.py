"""Facts of a model's folder, read from its files, without torch and transformers."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_LONGEST_HEADER = 100_000_000
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


@dataclass(frozen=True)
class ModelFolder:
    """`setting` is the one that names the folder; errors begin with it."""

    path: Path
    setting: str

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Of the language model, which stands below `text_config` in models of several modes."""
        outer = self._read("config.json")
        if not outer:
            raise ConfigError(
                f"{self.setting}: {self.path} has no config.json, or one without keys: it holds no "
                "model"
            )
        inner = outer.get("text_config")
        return {**outer, **inner} if isinstance(inner, Mapping) else outer

    @property
    def has_weights(self) -> bool:
        return any(any(self.path.glob(pattern)) for pattern in _WEIGHTS)

    @cached_property
    def num_parameters(self) -> int:
        """By the headers of its safetensors; 0 where it has none that can be read."""
        listed = self._read("model.safetensors.index.json").get("weight_map") or {}
        files = [self.path / name for name in set(listed.values())]
        found = files or sorted(self.path.glob("*.safetensors"))
        return sum(prod(shape) for file in found for shape in _shapes(file))

    @property
    def brings_code(self) -> bool:
        return "auto_map" in self.config

    @property
    def context(self) -> float:
        """Tokens of the longest sequence, infinite if the folder does not tell."""
        config = self.config
        names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        longest = next((config[name] for name in names if config.get(name)), math.inf)
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
        return float(longest) * max(1.0, float(factor or 1.0))

    @property
    def limited_attention(self) -> str:
        """How attention is cut off in some layer; "" where every layer sees every token."""
        config = self.config
        kinds = set(config.get("layer_types") or ()) - {"full_attention"}
        slides = config.get("sliding_window") and config.get("use_sliding_window", True)
        return ", ".join(sorted(kinds)) or ("sliding windows" if slides else "")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Those that end a sequence, by the model and by its generation settings."""
        named = (self.config, self._read("generation_config.json"))
        return frozenset(i for facts in named for i in _listed(facts.get("eos_token_id")))

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)

    @property
    def has_chat_template(self) -> bool:
        template = self._read("tokenizer_config.json").get("chat_template")
        return bool(template) or (self.path / "chat_template.jinja").is_file()

    @cached_property
    def token_ids(self) -> Mapping[str, int]:
        """The tokens that text is made of; {} where tokenizer.json is missing."""
        vocabulary = (self._tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, Mapping):
            return vocabulary
        # Unigram lists [token, score] in the order of the ids.
        return {entry[0]: number for number, entry in enumerate(vocabulary)}

    @cached_property
    def special_token_ids(self) -> Mapping[str, int]:
        """Those that were added to them."""
        return {t["content"]: t["id"] for t in self._tokenizer.get("added_tokens") or ()}

    @property
    def tokenizer_eos(self) -> int | None:
        """The id of the token that ends a sequence, by the tokenizer's own settings."""
        token = self._read("tokenizer_config.json").get("eos_token")
        name = token.get("content") if isinstance(token, Mapping) else token
        return {**self.token_ids, **self.special_token_ids}.get(str(name))

    @cached_property
    def _tokenizer(self) -> Mapping[str, Any]:
        return self._read("tokenizer.json")

    def _read(self, name: str) -> Mapping[str, Any]:
        file = self.path / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"{self.setting}: cannot read {file}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{self.setting}: {file} is not JSON: {error}") from error
        return content if isinstance(content, Mapping) else {}


def require_same_tokens(
    setting: str, path: str, wanted: Mapping[str, int], found: Mapping[str, int]
) -> None:
    """
    Args:
        setting: names the model at `path`.
        wanted: the policy's tokens, with their ids.
        found: those of the model at `path`.

    Raises:
        ConfigError: a token of the policy has another id there, or none.
    """
    for token, number in sorted(wanted.items(), key=lambda item: item[1]):
        if found.get(token) != number:
            there = f"is {found[token]}" if token in found else "does not exist"
            raise ConfigError(
                f"{setting}: {path} has another tokenizer than the policy: token {token!r} is "
                f"{number} for the policy and {there} in {path}; name a model with the policy's "
                "tokenizer, such as a smaller one of its family"
            )


def local_folder(setting: str, name: str) -> ModelFolder | None:
    """The folder of this name, here or in the Hub's cache."""
    path = Path(name) if Path(name).is_dir() else hub_folder(name)
    return ModelFolder(path, setting) if path else None


def hub_folder(name: str) -> Path | None:
    """The folder of a model in the Hub's cache, if it is there."""
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = repository / "snapshots" / revision
    return folder if folder.is_dir() else None


def hub_cache() -> Path:
    """Where the Hub's client keeps models, by the variables that it reads."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


def _shapes(file: Path) -> Iterator[tuple[int, ...]]:
    """Of the tensors in a file: 8 bytes with the length of the JSON that follows."""
    try:
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if length > _LONGEST_HEADER:
                return
            header = json.loads(content.read(length))
    except (OSError, ValueError):
        return
    for name, tensor in header.items():
        if name != "__metadata__":
            yield tuple(tensor["shape"])


def _listed(ids: Any) -> Iterator[int]:
    if isinstance(ids, int):
        yield ids
    elif isinstance(ids, list):
        yield from ids
