"""Checkpoints that hold no model: for those who look at books and histories alone."""

import json
from pathlib import Path

import msgspec

from streamrl.checkpoints.find import FORMAT
from streamrl.checkpoints.history import new_history
from streamrl.checkpoints.manifest import record_files, write_manifest
from streamrl.types import Books

HISTORY = new_history()


def write_checkpoint(run: Path, version: int, books: Books) -> Path:
    """A complete one of this version in the folder of a run, whose history is HISTORY."""
    folder = run / "checkpoints" / f"step-{version:08d}"
    folder.mkdir(parents=True)
    state = {
        "format": FORMAT,
        "policy_version": version,
        "books": msgspec.to_builtins(books, str_keys=True),
        "history": msgspec.to_builtins(HISTORY),
    }
    (folder / "state.json").write_text(json.dumps(state))
    write_manifest(folder, record_files(folder, [folder / "state.json"]))
    return folder
