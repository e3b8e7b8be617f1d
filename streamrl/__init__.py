"""StreamRL: asynchronous off-policy streaming reinforcement learning for language models.

Importing this package, `streamrl.config`, `streamrl.wire` or `buffers` loads neither torch nor
transformers: the buffer's image needs no CUDA, and the command line answers at once.
`streamrl.train` starts a run; see `streamrl.api`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.api import Run, train

__all__ = ["Run", "__version__", "train"]

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    if name not in ("Run", "train"):
        raise AttributeError(f"module 'streamrl' has no attribute {name!r}")
    from streamrl import api

    return getattr(api, name)
