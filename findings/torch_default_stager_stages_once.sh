#!/bin/sh
# torch 2.11.0 and 2.12.1: torch.distributed.checkpoint.staging.DefaultStager without asynchronous
# staging copies a state dict only once. Each stage() ends by closing its internal StateDictStager, which
# clears its table of types, so the second stage() raises. torch 2.13.0 copies any number of times.
# StateDictStager itself, in torch.distributed.checkpoint._state_dict_stager, does so in all three versions.
#
# Seen with Python 3.11.7 on Linux x86_64 without a GPU (this script installs 2.11.0, some 3 GB):
#   DefaultStager of torch 2.11.0: 1 copy, then KeyError(<class 'type'>)
#   StateDictStager of torch 2.11.0: 3 copies
# Exit code 1 if it behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir "torch==2.11.0" numpy
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def copies(stager):
    """Return how many of three copies are made and correct, and the error that ended them."""
    tensor = torch.zeros(4)
    for number in range(3):
        tensor.fill_(number)
        try:
            copy = stager.stage({"weight": tensor})["weight"]
        except KeyError as error:
            return number, error
        assert copy.tolist() == [number] * 4
    return 3, None


release = torch.__version__.partition("+")[0]
default = copies(DefaultStager(StagingOptions(False, False, False, False)))
direct = copies(StateDictStager())
print(f"DefaultStager of torch {release}: {default[0]} copy, then {default[1]!r}")
print(f"StateDictStager of torch {release}: {direct[0]} copies")
sys.exit((default[0], str(default[1]), direct) != (1, "<class 'type'>", (3, None)))
PYTHON
