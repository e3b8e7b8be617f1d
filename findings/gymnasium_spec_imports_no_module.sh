#!/bin/sh
# gymnasium 1.4.0: an id may name the module that registers the environment, as MODULE:ID. gymnasium.make
# imports the module and finds the environment; gymnasium.spec imports nothing and raises NameNotFound for
# the same id. After a call of make, spec finds ID without the module, but still not MODULE:ID.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   spec("shop:Shop-v0"): NameNotFound
#   make("shop:Shop-v0"): found as Shop-v0
#   spec("Shop-v0"): found as Shop-v0
#   spec("shop:Shop-v0"): NameNotFound
# Exit code 1 if a version behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "gymnasium==1.4.0"
cat > "$folder/shop.py" <<'PYTHON'
import gymnasium


class Shop(gymnasium.Env):
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(2)


gymnasium.register("Shop-v0", Shop)
PYTHON
cd "$folder"
PYTHONPATH=. "$folder/venv/bin/python" - <<'PYTHON'
import sys

import gymnasium


def found(call, name):
    try:
        made = call(name)
    except gymnasium.error.NameNotFound:
        result = "NameNotFound"
    else:
        result = "found as " + (made.spec if call is gymnasium.make else made).id
    print(f'{call.__name__}("{name}"): {result}')
    return result


seen = [
    found(gymnasium.spec, "shop:Shop-v0"),
    found(gymnasium.make, "shop:Shop-v0"),
    found(gymnasium.spec, "Shop-v0"),
    found(gymnasium.spec, "shop:Shop-v0"),
]
sys.exit(seen != ["NameNotFound", "found as Shop-v0", "found as Shop-v0", "NameNotFound"])
PYTHON
