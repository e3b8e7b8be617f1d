"""Images on a real vLLM, before and after an update.

vLLM's image processors need torchvision, of which PyPI has builds for GPUs alone. For this test one
of them stands beside vLLM's packages: it fails at two of its kernels, which no processor needs, so
that `sitecustomize` declares them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

TORCHVISION = "torchvision==0.28.0"
DECLARED = """
import torch

declared = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder of packages."""
    folder = tmp_path / "beside"
    # The environment of vLLM has no pip.
    install = [ROOT / ".venv" / "bin" / "python", ROOT / "deploy" / "install.py", sys.executable]
    subprocess.run([*install, "--no-deps", "--target", folder, TORCHVISION], check=True)
    (folder / "sitecustomize.py").write_text(DECLARED)
    return folder


@pytest.mark.long
def test_after_an_update_an_image_that_was_seen_is_seen_with_the_new_weights(
    beside: Path, tmp_path: Path
) -> None:
    """vLLM keeps what the old ones have made of it."""
    environment = {**os.environ, "PYTHONPATH": f"{beside}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.vllm.seeing", str(tmp_path)]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    errors = json.loads(ran.stdout.splitlines()[-1])
    assert errors["0"] < 1e-4
    assert errors["1"] < 1e-4
