"""A folder that appears whole, by one process at a time."""

from pathlib import Path

import pytest

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
