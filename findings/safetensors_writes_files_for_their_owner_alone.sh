#!/bin/sh
# safetensors 0.8.0 makes files with mode 0600, whatever the umask: in a shared folder, under umask 022,
# everybody can read a saved model's config.json, but colleagues and the user of a service cannot read its
# weights. 0.7.0 followed the umask.
#
# Seen with Python 3.11.7 on Linux x86_64, numpy 2.4.1, umask 022:
#   0.7.0: save_file 0644, open() 0644
#   0.8.0: save_file 0600, open() 0644
# Exit code 1 if a version behaves differently.
set -eu
umask 022
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/look.py" <<'PYTHON'
import os
import sys
from importlib.metadata import version

import numpy
from safetensors.numpy import save_file

folder, expected = sys.argv[1:]
os.chdir(folder)
save_file({"a": numpy.ones(4, numpy.float32)}, "a.safetensors")
with open("config.json", "w") as file:
    file.write("{}")
modes = [f"{os.stat(name).st_mode & 0o777:04o}" for name in ("a.safetensors", "config.json")]
print(f"{version('safetensors')}: save_file {modes[0]}, open() {modes[1]}")
sys.exit(modes != [expected, "0644"])
PYTHON
for pair in 0.7.0=0644 0.8.0=0600; do
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "safetensors==${pair%=*}" numpy==2.4.1
  mkdir "$folder/${pair%=*}"
  "$folder/venv/bin/python" "$folder/look.py" "$folder/${pair%=*}" "${pair#*=}"
done
