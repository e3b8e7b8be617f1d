#!/bin/sh
# nohup starts a command with SIGHUP ignored, so that it outlives the terminal. torchrun of torch 2.13.0
# installs its own handler for SIGHUP regardless: a training started by `nohup torchrun ... &` ends when the
# terminal closes. It stays alive if --signals-to-handle omits SIGHUP.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   nohup python: alive after SIGHUP
#   nohup torchrun: ended by SIGHUP
#   nohup torchrun --signals-to-handle SIGTERM,SIGINT,SIGQUIT: alive after SIGHUP
# Exit code 1 if it behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir "torch==2.13.0" numpy
cat > "$folder/work.py" <<'PYTHON'
import time
from pathlib import Path

Path("working").touch()
time.sleep(60)
PYTHON
cat > "$folder/look.py" <<'PYTHON'
import signal
import subprocess
import sys
import time
from pathlib import Path

name, expected, *command = sys.argv[1:]
Path("working").unlink(missing_ok=True)
run = subprocess.Popen(["nohup", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
deadline = time.monotonic() + 120
while not Path("working").exists() and time.monotonic() < deadline:
    time.sleep(0.1)
run.send_signal(signal.SIGHUP)
try:
    run.wait(10)
    found = "ended by SIGHUP"
except subprocess.TimeoutExpired:
    found = "alive after SIGHUP"
    run.terminate()
    run.wait()
print(f"nohup {name}: {found}")
sys.exit(found != expected)
PYTHON
cd "$folder"
python="$folder/venv/bin/python"
torchrun="$folder/venv/bin/torchrun --standalone --nproc-per-node 1"
"$python" look.py python "alive after SIGHUP" "$python" work.py
"$python" look.py torchrun "ended by SIGHUP" $torchrun work.py
handled=SIGTERM,SIGINT,SIGQUIT
"$python" look.py "torchrun --signals-to-handle $handled" "alive after SIGHUP" \
  $torchrun --signals-to-handle "$handled" work.py
