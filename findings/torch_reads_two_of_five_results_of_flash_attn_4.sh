#!/bin/sh
# torch.nn.attention.activate_flash_attention_impl("FA4") makes torch call flash-attn-4 instead of its own
# kernel. Torch 2.13 expects two results of `_flash_attn_fwd`, but flash-attn-4 4.0.0b36, the newest one in
# November 2026, returns five: the activation succeeds, and on a GPU each call of attention ends with
# "ValueError: too many values to unpack (expected 2)". Torch 2.14 ignores the rest. Torch 2.11 also refuses
# the gradient of varlen_attn, since it takes the window size -1, which means no window, for a window.
#
# SGLang 0.5.23 requires flash-attn-4, so it is often installed. The script reads the sources, since the
# kernel needs a GPU.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   flash-attn-4 4.0.0b36: _flash_attn_fwd returns 5 results
#   torch 2.13.0: reads 2 results, and no more
#   torch 2.14.1: reads 2 results, and leaves the rest
# Exit code 1 if a version behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
fetch() {
    "$folder/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version 3.12 --platform macosx_14_0_arm64 --dest "$folder" "$1"
}
fetch flash-attn-4==4.0.0b36
# The smallest of torch's wheels; the Python code is the same in all of them.
fetch torch==2.13.0
fetch torch==2.14.1
cat > "$folder/look.py" <<'PYTHON'
import ast
import sys
from pathlib import Path
from zipfile import ZipFile

KERNEL = "_flash_attn_fwd"


def tree(wheel, member):
    [path] = Path(sys.argv[1]).glob(wheel)
    return ast.parse(ZipFile(path).read(member))


def returned():
    functions = ast.walk(tree("flash_attn_4-*.whl", "flash_attn/cute/interface.py"))
    [kernel] = [f for f in functions if isinstance(f, ast.FunctionDef) and f.name == KERNEL]
    results = [r.value for r in ast.walk(kernel) if isinstance(r, ast.Return)]
    return {len(value.elts) for value in results if isinstance(value, ast.Tuple)}


def read(version):
    for node in ast.walk(tree(f"torch-{version}-*.whl", "torch/nn/attention/_fa4.py")):
        if isinstance(node, ast.Assign) and KERNEL in ast.unparse(node.value):
            names = node.targets[0].elts
            leaves_rest = any(isinstance(name, ast.Starred) for name in names)
            return len(names) - leaves_rest, leaves_rest
    raise SystemExit(f"torch {version} does not call {KERNEL}")


[count] = returned()
lines = [f"flash-attn-4 4.0.0b36: {KERNEL} returns {count} results"]
for version in ("2.13.0", "2.14.1"):
    number, leaves_rest = read(version)
    rest = "leaves the rest" if leaves_rest else "no more"
    lines.append(f"torch {version}: reads {number} results, and {rest}")
print("\n".join(lines))
sys.exit(
    lines
    != [
        "flash-attn-4 4.0.0b36: _flash_attn_fwd returns 5 results",
        "torch 2.13.0: reads 2 results, and no more",
        "torch 2.14.1: reads 2 results, and leaves the rest",
    ]
)
PYTHON
"$folder/venv/bin/python" "$folder/look.py" "$folder"
