#!/bin/sh
# transformers 5.19.0 loads a tokenizer of the class PreTrainedTokenizerFast, which many models name, and
# saves it with "tokenizer_class": "TokenizersBackend". transformers 4.57.6 loads the original folder, but
# refuses the saved one, since it has no such class. To save a model with 5 for software that uses 4, keep
# the model's own tokenizer_config.json.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   4.57.6: folder a names PreTrainedTokenizerFast, loaded
#   5.19.0: folder b, written of a, names TokenizersBackend
#   4.57.6: folder b refused: ValueError
# Exit code 1 if a version behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.19.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
done
cat > "$folder/look.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

task, folder = sys.argv[1], Path(sys.argv[2])


def named(place):
    return json.loads((place / "tokenizer_config.json").read_text())["tokenizer_class"]


if task == "make":
    model = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?").save_pretrained(folder / "a")
    AutoTokenizer.from_pretrained(folder / "a")
    found = f"folder a names {named(folder / 'a')}, loaded"
    expected = "folder a names PreTrainedTokenizerFast, loaded"
elif task == "write":
    AutoTokenizer.from_pretrained(folder / "a").save_pretrained(folder / "b")
    found = f"folder b, written of a, names {named(folder / 'b')}"
    expected = "folder b, written of a, names TokenizersBackend"
else:
    try:
        AutoTokenizer.from_pretrained(folder / "b")
        found = "folder b loaded"
    except Exception as error:
        found = f"folder b refused: {type(error).__name__}"
    expected = "folder b refused: ValueError"
print(f"{transformers.__version__}: {found}")
sys.exit(found != expected)
PYTHON
"$folder/4.57.6/bin/python" "$folder/look.py" make "$folder" 2>/dev/null
"$folder/5.19.0/bin/python" "$folder/look.py" write "$folder" 2>/dev/null
"$folder/4.57.6/bin/python" "$folder/look.py" load "$folder" 2>/dev/null
