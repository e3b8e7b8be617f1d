"""Facts about a model folder, read from its files without torch and transformers."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from streamrl.errors import ConfigError, read_text

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
VISION = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model families with vision that StreamRL supports: the vision tower takes patches and their grid,
and the text model takes positions on three axes (`streamrl.vision.tower`)."""
_LONGEST_HEADER = 100_000_000
_SAMPLE = 4096
"""Leading bytes of each tensor that are compared to tell weights apart."""
_TENSOR = {"shape", "data_offsets"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


_Counts: TypeAlias = int | list[int] | None
"""One, or one for each layer."""


class _Rope(Struct):
    factor: float | None = None
    original_max_position_embeddings: float | None = None


class _Facts(Struct):
    """The types of what is computed with in a language model's config.json."""

    max_position_embeddings: float | None = None
    n_positions: float | None = None
    max_seq_len: float | None = None
    seq_length: float | None = None
    original_max_position_embeddings: float | None = None
    vocab_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    n_head: int | None = None
    num_key_value_heads: _Counts = None
    intermediate_size: _Counts = None
    num_experts: _Counts = None
    num_local_experts: _Counts = None
    n_routed_experts: _Counts = None
    moe_num_experts: _Counts = None
    num_experts_per_tok: int | None = None
    moe_k: int | None = None
    layer_types: list[str] | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None


@dataclass(frozen=True)
class ModelFolder:
    """`setting` is the setting that names the folder; errors begin with it."""

    path: Path
    setting: str

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The language model's configuration, which multimodal models have in `text_config`."""
        outer = self._read("config.json")
        if not outer:
            raise ConfigError(
                f"{self.setting}: {self.path} has no config.json, or one without keys: it holds no "
                "model"
            )
        inner = outer.get("text_config")
        config = {**outer, **inner} if isinstance(inner, Mapping) else outer
        try:
            msgspec.convert(config, _Facts)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.setting}: {self.path / 'config.json'}: {error}") from error
        return config

    @property
    def family(self) -> object:
        """The `model_type` of the whole model, including its vision part; None if it has none."""
        return self._read("config.json").get("model_type")

    @property
    def has_weights(self) -> bool:
        return any(any(self.path.glob(pattern)) for pattern in _WEIGHTS)

    @cached_property
    def num_parameters(self) -> int:
        """Counted from the safetensors headers; 0 if none can be read."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the tensors in its safetensors, by name; {} if none can be read."""
        headers = (_header(self.path / name)[0] for name in self._weight_files)
        return {name: tensor["shape"] for header in headers for name, tensor in header.items()}

    @cached_property
    def digest(self) -> str:
        """A digest of the names, shapes and first bytes of the tensors in its safetensors,
        independent of their division into files; "" if none can be read."""
        samples = {
            n: s for name in sorted(self._weight_files) for n, s in _samples(self.path / name)
        }
        whole = b"".join(samples[name] for name in sorted(samples))
        return sha256(whole).hexdigest() if samples else ""

    @cached_property
    def damage(self) -> str:
        """Which weight file is missing or truncated; "" if none is known to be."""
        for name in sorted(self._weight_files):
            file = self.path / name
            if not file.is_file():
                return f"{name} is missing"
            size, wanted = file.stat().st_size, _num_bytes(file)
            if not wanted:
                return f"{name} has no header that can be read"
            if size < wanted:
                return f"{name} has {size} bytes of {wanted}"
        return ""

    @property
    def _weight_files(self) -> set[str]:
        """The safetensors files: those of the index if there is one, otherwise model.safetensors if
        it is there (others beside it hold the same again), otherwise all."""
        listed = self._read("model.safetensors.index.json").get("weight_map") or {}
        found = {file.name for file in self.path.glob("*.safetensors")}
        return {*listed.values()} or ({"model.safetensors"} & found) or found

    @property
    def sees_images(self) -> bool:
        return self.family in VISION

    @property
    def context(self) -> float:
        """Longest sequence in tokens; infinite if the folder does not say."""
        config = self.config
        names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        longest = next((config[name] for name in names if config.get(name)), math.inf)
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        factor = scaling.get("factor") if isinstance(scaling, Mapping) else None
        return float(longest) * max(1.0, float(factor or 1.0))

    @property
    def limited_attention(self) -> str:
        """How attention is limited in some layers; "" if every layer sees every token."""
        config = self.config
        kinds = set(config.get("layer_types") or ()) - {"full_attention"}
        slides = config.get("sliding_window") and config.get("use_sliding_window", True)
        return ", ".join(sorted(kinds)) or ("sliding windows" if slides else "")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a sequence, by the model's and its generation settings."""
        named = (self.config, self._read("generation_config.json"))
        return frozenset(i for facts in named for i in _listed(facts.get("eos_token_id")))

    @property
    def has_tokenizer(self) -> bool:
        return any((self.path / name).is_file() for name in TOKENIZER_FILES)

    @cached_property
    def chat_template(self) -> str:
        """The Jinja text, of all templates if there are several; "" if there is none."""
        file = self.path / "chat_template.jinja"
        named = self._read("tokenizer_config.json").get("chat_template")
        return str(named or (read_text(file, self.setting) if file.is_file() else ""))

    @cached_property
    def token_ids(self) -> Mapping[str, int]:
        """Ids of the tokens in the vocabulary, by token; {} without tokenizer.json."""
        vocabulary = (self._tokenizer.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, Mapping):
            return vocabulary
        # Unigram models list [token, score] in order of ids.
        return {entry[0]: number for number, entry in enumerate(vocabulary)}

    @cached_property
    def special_token_ids(self) -> Mapping[str, int]:
        """Ids of the tokens that were added to the vocabulary, by token."""
        return {t["content"]: t["id"] for t in self._tokenizer.get("added_tokens") or ()}

    @property
    def tokenizer_eos(self) -> int | None:
        """Id of the token that ends a sequence, by the tokenizer's settings."""
        token = self._read("tokenizer_config.json").get("eos_token")
        name = token.get("content") if isinstance(token, Mapping) else token
        return {**self.token_ids, **self.special_token_ids}.get(str(name))

    @cached_property
    def _tokenizer(self) -> Mapping[str, Any]:
        return self._read("tokenizer.json")

    def _read(self, name: str) -> Mapping[str, Any]:
        file = self.path / name
        try:
            content = json.loads(read_text(file, self.setting)) if file.exists() else {}
        except ValueError as error:
            raise ConfigError(f"{self.setting}: {file} is not JSON: {error}") from error
        return content if isinstance(content, Mapping) else {}


def require_same_tokens(
    setting: str, path: str, wanted: Mapping[str, int], found: Mapping[str, int]
) -> None:
    """Raise ConfigError if a token of the policy (`wanted`) has another id or none in the model at
    `path`, which `setting` names."""
    for token, number in sorted(wanted.items(), key=lambda item: item[1]):
        if found.get(token) != number:
            there = f"is {found[token]}" if token in found else "does not exist"
            raise ConfigError(
                f"{setting}: {path} has another tokenizer than the policy: token {token!r} is "
                f"{number} for the policy and {there} in {path}; name a model with the policy's "
                "tokenizer, such as a smaller one of its family"
            )


def local_folder(setting: str, name: str) -> ModelFolder | None:
    """The model folder of this name, on disk or in the hub's cache; None if there is none."""
    if (path := Path(name)).is_dir():
        return ModelFolder(path, setting)
    # Imported here, since most runs name a folder.
    from huggingface_hub.constants import HF_HUB_CACHE

    repository = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = repository / "snapshots" / revision
    return ModelFolder(folder, setting) if folder.is_dir() else None


def _header(file: Path) -> tuple[Mapping[str, Any], int]:
    """The tensors in a safetensors file by name, and the offset of their bytes; ({}, 0) if it
    cannot be read. The file begins with 8 bytes that hold the length of the JSON header."""
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
    """For each tensor in a file its name, and its description with its first bytes."""
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
    """The size of the file according to its header."""
    tensors, begin = _header(file)
    return begin + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)


def _listed(ids: Any) -> Iterator[int]:
    if isinstance(ids, int):
        yield ids
    elif isinstance(ids, list):
        yield from ids
