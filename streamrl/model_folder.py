"""Facts of a model's folder, read from its files, without torch and transformers."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError, reading

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
VISION = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Models that see images: their vision tower takes patches with their grid, and their text model
positions of three axes, as `streamrl.vision.tower` has it."""
_LONGEST_HEADER = 100_000_000
_SAMPLE = 4096
"""Bytes of each tensor that tell weights apart."""
_TENSOR = {"shape", "data_offsets"}
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
    def family(self) -> object:
        """Of the whole model, which may see images besides; None if it does not say."""
        return self._read("config.json").get("model_type")

    @property
    def has_weights(self) -> bool:
        return any(any(self.path.glob(pattern)) for pattern in _WEIGHTS)

    @cached_property
    def num_parameters(self) -> int:
        """By the headers of its safetensors; 0 where it has none that can be read."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Of the tensors in its safetensors, by their names; {} where none can be read."""
        headers = (_header(self.path / name)[0] for name in self._weight_files)
        return {name: tensor["shape"] for header in headers for name, tensor in header.items()}

    @cached_property
    def digest(self) -> str:
        """Of the names, the shapes and the first bytes of the tensors in its safetensors, however
        they are divided into files; "" where none can be read."""
        samples = {
            n: s for name in sorted(self._weight_files) for n, s in _samples(self.path / name)
        }
        whole = b"".join(samples[name] for name in sorted(samples))
        return sha256(whole).hexdigest() if samples else ""

    @cached_property
    def damage(self) -> str:
        """Which file of the weights is missing or cut off; "" if none is, or none is known."""
        for name in sorted(self._weight_files):
            file = self.path / name
            if not file.is_file():
                return f"{name} is missing"
            size, wanted = file.stat().st_size, _num_bytes(file)
            if size and not wanted:
                return f"{name} has no header that can be read"
            if size < wanted:
                return f"{name} has {size} bytes of {wanted}"
        return ""

    @property
    def _weight_files(self) -> set[str]:
        """The safetensors, by their index where there is one; without it, of the usual name where
        there is one, since others beside it hold the same again."""
        listed = self._read("model.safetensors.index.json").get("weight_map") or {}
        found = {file.name for file in self.path.glob("*.safetensors")}
        return {*listed.values()} or ({"model.safetensors"} & found) or found

    @property
    def sees_images(self) -> bool:
        return self.family in VISION

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

    @cached_property
    def chat_template(self) -> str:
        """Jinja; of several the text of all; "" where there is none."""
        file = self.path / "chat_template.jinja"
        named = self._read("tokenizer_config.json").get("chat_template")
        return str(named or (file.read_text(encoding="utf-8") if file.is_file() else ""))

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
            with reading(file, self.setting):
                content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        except ValueError as error:
            raise ConfigError(f"{self.setting}: {file} is not JSON: {error}") from error
        return content if isinstance(content, Mapping) else {}


def require_same_tokens(
    setting: str, path: str, wanted: Mapping[str, int], found: Mapping[str, int]
) -> None:
    """Raise ConfigError if a token of the policy, `wanted`, has another id, or none, in the model
    at `path`, which `setting` names."""
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
    if (path := Path(name)).is_dir():
        return ModelFolder(path, setting)
    # Most runs name a folder.
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = repository / "snapshots" / revision
    return ModelFolder(folder, setting) if folder.is_dir() else None


def _header(file: Path) -> tuple[Mapping[str, Any], int]:
    """The tensors in a file, by their names, and where their bytes begin: 8 bytes with the length
    of the JSON that follows. Neither of a file that cannot be read."""
    try:
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            if length > _LONGEST_HEADER:
                return {}, 0
            header = json.loads(content.read(length))
    except (OSError, ValueError):
        return {}, 0
    if not isinstance(header, dict):
        return {}, 0
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    known = (isinstance(t, dict) and t.keys() >= _TENSOR for t in tensors.values())
    return (tensors, 8 + length) if all(known) else ({}, 0)


def _samples(file: Path) -> Iterator[tuple[str, bytes]]:
    """Of the tensors in a file, by their names: what each is, and how it begins."""
    tensors, begin = _header(file)
    if not tensors:
        return
    with file.open("rb") as content:
        for name, tensor in tensors.items():
            first, last = tensor["data_offsets"]
            content.seek(begin + first)
            described = f"{name} {tensor.get('dtype')} {tensor['shape']}".encode()
            yield name, described + content.read(min(last - first, _SAMPLE))


def _num_bytes(file: Path) -> int:
    """What the file has by its own header."""
    tensors, begin = _header(file)
    return begin + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)


def _listed(ids: Any) -> Iterator[int]:
    if isinstance(ids, int):
        yield ids
    elif isinstance(ids, list):
        yield from ids
