#!/usr/bin/env bash
# `ParquetFile.read()` cannot read a file that pyarrow itself has written, if a column of lists, such as a
# column of images, has 2 GiB or more: an array counts bytes in 32 bits, so the column needs several
# arrays, which "is not implemented" for nested types. Reading in batches works.
#
# Seen with pyarrow 26.0.1 (Python 3.11): a column list<binary> of 2.1 GiB in 2,200 rows
#   read()          ArrowNotImplementedError: Nested data conversions not implemented for chunked array outputs
#   iter_batches()  2200 rows
#
# StreamRL therefore reads such a file in batches (streamrl/data_files/arrow.py).
# Takes 3 GB of memory; the file is small, since all its bytes are equal. Fails if this behavior changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1

cat > "$folder/read.py" <<'PYTHON'
import sys

import pyarrow
import pyarrow.parquet

ROWS, ROW = 2200, [bytes(2**20)]


def main(path: str) -> int:
    kind = pyarrow.list_(pyarrow.binary())
    schema = pyarrow.schema([("images", kind)])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        group = [pyarrow.array([ROW] * 100, kind) for _ in range(ROWS // 100)]
        column = pyarrow.chunked_array(group)
        writer.write_table(pyarrow.table([column], schema=schema), row_group_size=ROWS)
        del group, column
    file = pyarrow.parquet.ParquetFile(path)
    try:
        answer = f"{file.read().num_rows} rows"
    except NotImplementedError as error:
        answer = f"{type(error).__name__}: {error}"
    print(f"read(): {answer}")
    count = sum(batch.num_rows for batch in file.iter_batches(batch_size=100))
    print(f"iter_batches(): {count} rows")
    return 0 if answer.startswith("ArrowNotImplementedError") and count == ROWS else 1


sys.exit(main(sys.argv[1]))
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder/images.parquet"
