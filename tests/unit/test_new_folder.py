"""A folder that appears whole, by one process at a time."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from streamrl.durable_files import new_folder


def test_one_that_another_process_is_writing_is_left_to_it(tmp_path: Path):
    path = tmp_path / "model"
    left = tmp_path / ".model.unfinished" / "of a killed process"
    left.mkdir(parents=True)
    with new_folder(path) as unfinished:
        (unfinished / "file").write_text("whole")
        with (
            pytest.raises(BlockingIOError, match="another process is writing it"),
            new_folder(path),
        ):
            pass
    assert [file.name for file in path.iterdir()] == ["file"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_who_may_read_the_folder_may_read_its_weights(tmp_path: Path):
    with new_folder(tmp_path / "model") as unfinished:
        unfinished.chmod(0o750)
        save_file({"weight": np.zeros(1)}, unfinished / "model.safetensors")
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == 0o640
