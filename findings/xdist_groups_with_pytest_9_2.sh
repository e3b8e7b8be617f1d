#!/bin/sh
# pytest-xdist 3.8.0 with pytest 9.2.0: `--dist loadgroup` ignores the mark xdist_group. Tests of one group
# run in parallel in several workers, without a warning. With pytest 9.1.1 the same tests run in one worker.
# xdist writes the group into the attribute _nodeid of an item, which pytest 9.2 does not read.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   pytest 9.1.1: 8 tests of one group in 1 of 2 workers
#   pytest 9.2.0: 8 tests of one group in 2 of 2 workers
# Exit code 1 if a version behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/test_group.py" <<'PYTHON'
import pathlib
import time

import pytest


@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_in_a_group(number, worker_id):
    time.sleep(0.2)
    (pathlib.Path(__file__).parent / f"ran-{worker_id}").touch()
PYTHON
cd "$folder"
for version in 9.1.1 9.2.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
        "pytest==$version" "pytest-xdist==3.8.0"
    rm -f ran-*
    "$folder/venv/bin/python" -m pytest -q -n 2 --dist loadgroup test_group.py > "log-$version"
    set -- ran-*
    echo "pytest $version: 8 tests of one group in $# of 2 workers"
done > seen
cat seen
printf '%s\n' "pytest 9.1.1: 8 tests of one group in 1 of 2 workers" \
    "pytest 9.2.0: 8 tests of one group in 2 of 2 workers" | cmp -s - seen
