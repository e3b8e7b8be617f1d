"""The optional extras: which packages each one installs, what needs them, and the sentence with
the command that installs one.

Invariant: every extra of pyproject.toml is in `EXTRAS`. Every package that is imported only on
demand is looked up here, so the error for a missing one names the same command everywhere.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import NamedTuple

from streamrl.errors import ConfigError


class Extra(NamedTuple):
    """`modules` are the import names of its packages; `needed_by` is Markdown."""

    modules: tuple[str, ...]
    needed_by: str


EXTRAS: Mapping[str, Extra] = {
    "vllm": Extra(("vllm",), "`generator.engine: vllm` without `vllm.url`"),
    "sglang": Extra(("sglang",), "`generator.engine: sglang` without `sglang.url`"),
    "redis": Extra(("redis",), "`buffer.url: redis://...`"),
    "s3": Extra(("s3fs",), "`weights.store`, `run.folder_mirror`: `s3://...`"),
    "gs": Extra(("gcsfs",), "`weights.store`, `run.folder_mirror`: `gs://...`"),
    "ray": Extra(("ray",), "`streamrl launch --ray`"),
    "wandb": Extra(("wandb",), "`tracking.wandb`"),
    "trackio": Extra(("trackio",), "`tracking.trackio`"),
    "tensorboard": Extra(("tensorboard",), "`tracking.tensorboard`"),
    "flash": Extra(("flash_attn",), "nothing: the learner's attention is faster with it on a GPU"),
    "liger": Extra(("liger_kernel",), "`learner.liger_layers: true`; faster on a GPU"),
    "lora": Extra(("peft",), "`learner.lora`"),
    "gguf": Extra(("accelerate", "gguf"), "`streamrl get-model` of a GGUF file, or of a package"),
    "gateway": Extra(("aiohttp",), "`generator.environment: agent`"),
    "gym": Extra(("gymnasium",), "`generator.environment`: `frozen_lake`, `gymnasium:ID`"),
    "math": Extra(("math_verify",), "`data.reward: math`"),
    "mcp": Extra(("mcp",), "`generator.mcp_servers`"),
    "notebook": Extra(("cloudpickle",), "`streamrl.train` with functions of a notebook"),
    "parquet": Extra(("pyarrow",), "`data.source: FILE.parquet`"),
    "datasets": Extra(("datasets",), "`data.source: datasets:NAME`, or a folder of that library"),
    "textarena": Extra(("textarena",), "`generator.environment: textarena:ID`"),
    "vision": Extra(("PIL",), "prompts with images"),
    "tasks": Extra(("reasoning_gym",), "`data.source: reasoning_gym:NAME`"),
}
"""The extras for users; `docs` and `dev` are for developing StreamRL."""

FLASH_ATTENTION: Mapping[object, str] = {3: "flash_attn_interface", 4: "flash_attn.cute"}
"""The modules of FlashAttention versions that no extra installs."""

_EXTRA_OF = {module: name for name, extra in EXTRAS.items() for module in extra.modules}
_EXTRA_OF["antlr4"] = "math"  # Comes with math-verify, and is imported before it.


def is_installed(module: str) -> bool:
    """Whether a module can be found. flash-attn and flash-attn-4 share the package `flash_attn`,
    which may hold one of them without the other."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def missing(needs: str, error: ImportError) -> ConfigError:
    """The error to raise if an import fails; `needs` begins with the setting, `learner.lora:`."""
    return not_installed(needs, str(error.name).partition(".")[0], str(error))


def not_installed(needs: str, module: str, reason: str = "") -> ConfigError:
    """The error for a module, by its name.

    >>> str(not_installed("learner.lora:", "peft"))
    "learner.lora: needs peft, which is not installed: pip install 'streamrl[lora]'"
    """
    if module not in _EXTRA_OF:
        return ConfigError(f"{needs} cannot be used: {reason}")
    command = f"pip install 'streamrl[{_EXTRA_OF[module]}]'"
    return ConfigError(f"{needs} needs {module}, which is not installed: {command}")


def require(needs: str, module: str) -> None:
    """Raise ConfigError if the module is not installed; imports nothing."""
    if not is_installed(module):
        raise not_installed(needs, module)
