#!/bin/sh
# flash-attn-4 4.0.0b36 installs flash_attn/cute without flash_attn/__init__.py. If flash-attn, the package
# of FlashAttention 2, is not installed, `flash_attn` is then a namespace package: importlib.util.find_spec
# finds it and `import flash_attn` works, although it has no function and no version. A check for flash-attn
# must therefore look for flash_attn.flash_attn_interface.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   before: flash_attn not found
#   after: flash_attn found, imported, flash_attn_varlen_func: False
#   after: flash_attn.flash_attn_interface not found, flash_attn.cute found
# Exit code 1 if a version behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/look.py" <<'PYTHON'
import sys
from importlib.util import find_spec


def found(name):
    return "found" if find_spec(name) is not None else "not found"


if sys.argv[1] == "before":
    lines = [f"flash_attn {found('flash_attn')}"]
    expected = ["flash_attn not found"]
else:
    first = f"flash_attn {found('flash_attn')}"
    import flash_attn

    has_it = hasattr(flash_attn, "flash_attn_varlen_func")
    two, four = "flash_attn.flash_attn_interface", "flash_attn.cute"
    lines = [
        f"{first}, imported, flash_attn_varlen_func: {has_it}",
        f"{two} {found(two)}, {four} {found(four)}",
    ]
    expected = [
        "flash_attn found, imported, flash_attn_varlen_func: False",
        f"{two} not found, {four} found",
    ]
for line in lines:
    print(f"{sys.argv[1]}: {line}")
sys.exit(lines != expected)
PYTHON
"$folder/venv/bin/python" "$folder/look.py" before
# The test needs only the package's files, not its dependencies.
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "flash-attn-4==4.0.0b36"
"$folder/venv/bin/python" "$folder/look.py" after
