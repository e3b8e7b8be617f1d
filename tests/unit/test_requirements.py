"""Every extra can be installed where the documents name it; uv resolves it and installs nothing."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy import install

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "pyproject.toml"
EXTRAS = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
# Each has requirements of its own that name a release of torch or build with one.
APART = ("vllm", "sglang", "flash", "liger")
DEBIAN_12 = "x86_64-manylinux_2_34"

pytestmark = pytest.mark.long


def resolve(*words: str, python: str = "3.11") -> str:
    """What uv finds for requirements, a line each."""
    listing = subprocess.run([*install.PIP, "config", "list"], capture_output=True, text=True)
    indexes = install.flags(install.settings(listing.stdout))
    platform = ["--python-version", python, "--python-platform", DEBIAN_12]
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run(
        [uv, "pip", "compile", "--quiet", str(PROJECT), *platform, *indexes, *words],
        capture_output=True,
        text=True,
    )
    if done.returncode and "No solution found" not in done.stderr and "CI" not in os.environ:
        pytest.skip(f"no index answers: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


TOGETHER = [[e for e in EXTRAS if e not in APART], *([e] for e in APART)]


@pytest.mark.parametrize("extras", TOGETHER, ids=lambda extras: extras[0])
def test_extras_resolve(extras: Sequence[str]):
    found = resolve(*(word for extra in extras for word in ("--extra", extra)))
    names = {re.split(r"[\[<>=!~;]", line)[0] for e in extras for line in EXTRAS[e]} - {"streamrl"}
    assert names
    for name in names:
        assert re.search(rf"^{re.escape(name)}==", found, re.MULTILINE | re.IGNORECASE), name
