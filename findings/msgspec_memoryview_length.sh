#!/bin/sh
# msgspec 0.19.0: a bytes field decoded as a memoryview has the right content and `nbytes`, but its len()
# covers the rest of the message, so numpy.frombuffer and other users of len() see a wrong size.
# msgspec 0.20.0 and 0.21.0 give the field's length.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   0.19.0: the field was sent with 100 bytes; len 155, nbytes 100
#   0.20.0: the field was sent with 100 bytes; len 100, nbytes 100
# Exit code 1 if a version behaves differently.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for version in 0.19.0 0.20.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "msgspec==$version"
    "$folder/venv/bin/python" - "$version" <<'PYTHON'
import sys

import msgspec


class Record(msgspec.Struct, array_like=True):
    data: memoryview
    name: str


message = msgspec.msgpack.encode(Record(memoryview(b"\x01" * 100), "x" * 50))
data = msgspec.msgpack.decode(message, type=Record).data
print(f"{sys.argv[1]}: the field was sent with 100 bytes; len {len(data)}, nbytes {data.nbytes}")
assert bytes(data) == b"\x01" * 100
expected = {"0.19.0": 155, "0.20.0": 100}[sys.argv[1]]
sys.exit((len(data), data.nbytes) != (expected, 100))
PYTHON
done
