"""The files of a model's folder that say how it sees, copied to a folder made from it.

Called by: whoever writes a model; without these files vLLM and transformers cannot load one that
sees images.
"""

import shutil
from pathlib import Path

from transformers.utils.hub import cached_file

FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)


def copy_processor_files(model: str, folder: Path) -> None:
    """Those that the folder or hub name `model` has, byte by byte.

    Raises:
        OSError: one cannot be written.
    """
    for name in FILES:
        found = cached_file(
            model,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if found is not None:
            shutil.copyfile(found, folder / name)
