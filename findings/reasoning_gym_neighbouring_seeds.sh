#!/usr/bin/env bash
# reasoning-gym draws entry i of a data set from its seed + i, so entry i of seed s is entry i - 1 of
# seed s + 1: data sets of neighboring seeds share all entries except one.
#
# Seen with reasoning-gym 0.1.25 (Python 3.11), 50 entries of seed 1000 and 50 of each other seed:
#   chain_sum, base_conversion, number_sorting, decimal_arithmetic
#   seed 1001: 49 shared, each one place further on; seed 1050: 0 shared
#
# StreamRL therefore uses seeds that are at least one block length apart (actors/prompts/tasks.py).
# Fails if this behavior changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check reasoning-gym==0.1.25

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

import reasoning_gym

SIZE, FIRST = 50, 1000
print("reasoning-gym", version("reasoning-gym"))


def questions(name, seed):
    return [entry["question"] for entry in reasoning_gym.create_dataset(name, seed=seed, size=SIZE)]


is_as_seen = True
for name in ("chain_sum", "base_conversion", "number_sorting", "decimal_arithmetic"):
    first, neighbor, apart = (questions(name, FIRST + shift) for shift in (0, 1, SIZE))
    is_shifted = first[1:] == neighbor[:-1]
    num_shared = len(set(first) & set(neighbor))
    num_apart = len(set(first) & set(apart))
    print(f"{name}: seed {FIRST + 1} shares {num_shared} of {SIZE}, shifted by one: {is_shifted}; "
          f"seed {FIRST + SIZE} shares {num_apart}")
    is_as_seen &= is_shifted and num_apart < SIZE // 10
sys.exit(0 if is_as_seen else 1)
PYTHON
