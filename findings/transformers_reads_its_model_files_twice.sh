#!/usr/bin/env bash
# The first access to a model class of transformers reads all of its model files a second time: `import
# transformers` reads them to learn which names they have, and `transformers.models` does the same again,
# since the cache of the first pass keeps only the last 128 of about 450 folders.
#
# Seen with transformers 5.19.0 (Python 3.11), without torch, counting what is opened:
#   import transformers                     1592 files of transformers/models, each once
#   from transformers import AutoConfig     1592 files, 3211 times; 1.1 s of CPU time have become 1.5
#
# StreamRL therefore imports transformers once and forks its daemons (streamrl/cli/processes/fork_server.py).
# Fails if this behavior changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.19.0

cat > "$folder/count.py" <<'PYTHON'
import builtins
import sys
import time
from collections import Counter

opened, plain = Counter(), builtins.open


def counting(file, *arguments, **options):
    name = str(file)
    opened[name] += "/transformers/models/" in name and name.endswith(".py")
    return plain(file, *arguments, **options)


builtins.open = counting
import transformers

first, first_s = sum(opened.values()), time.process_time()
from transformers import AutoConfig

all_s, num_files = time.process_time(), sum(count > 0 for count in opened.values())
total = sum(opened.values())
print(f"transformers {transformers.__version__}: import opens {first} model files in {first_s:.1f} s of CPU time")
print(f"with {AutoConfig.__name__} {num_files} files are opened {total} times, in {all_s:.1f} s")
sys.exit(0 if first > 1000 and total >= 2 * num_files else 1)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/count.py"
