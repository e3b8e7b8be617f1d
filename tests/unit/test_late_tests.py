"""A run of the tests that has a time to keep skips what has not begun by then, and says so."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = "".join(f"def test_{number}(): pass\n" for number in range(4))


@pytest.mark.parametrize(("is_over", "summary"), [(True, "4 skipped"), (False, "4 passed")])
def test_what_has_not_begun_in_time_is_skipped_with_its_reason(
    tmp_path: Path, is_over: bool, summary: str
):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_four.py").write_text(TESTS)
    end_s = 1 if is_over else int(time.time()) + 600
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "--rootdir", str(tmp_path), str(tmp_path)],
        env={**os.environ, "STREAMRL_TESTS_END": str(end_s)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert summary in done.stdout.splitlines()[-1]
    assert ("the time for this run of the tests is over" in done.stdout) == is_over
