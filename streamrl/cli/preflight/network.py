"""Whether addresses can be listened at, keys be read, and servers be reached; each is asked once.

Nothing here waits longer than ANSWER_S for one address.
"""

import asyncio
import errno
import socket
from collections.abc import Iterator
from pathlib import Path

from buffers.connect import connect
from streamrl.cli.preflight.findings import Finding, fact, problem, refusal, warning
from streamrl.config import RunConfig
from streamrl.config.addresses import bound_socket, host_of, places_of, port_of
from streamrl.config.secrets import REDIS_PASSWORD
from streamrl.errors import ConfigError, StreamRLError

ANSWER_S = 0.8
_REDIS_PORTS = {"redis+sentinel": 26379}


def check_addresses(config: RunConfig) -> Iterator[Finding]:
    """Where the buffer and the learner listen; on another machine that is found out there."""
    url, address = config.buffer.url, config.weights.address
    if url.startswith("memory://"):
        yield problem(
            f"buffer.url: was {url!r}, which lives in one process, and a run has several; use "
            "zmq://127.0.0.1:0 or redis://HOST"
        )
    if config.buffer.has_daemon:
        yield from check_listening("buffer.url", url)
    yield from check_listening("weights.address", address)
    if config.buffer.curve is not None:
        yield from _check_keys(config.buffer.curve)
    yield fact(f"buffer.url: {url}; weights.address: {address}")


def check_servers(config: RunConfig) -> Iterator[Finding]:
    """Redis and an inference server elsewhere. Waits ANSWER_S for each."""
    if config.buffer.url.startswith("redi"):
        yield from _check_redis(config)
    for url in config.generator.urls:
        host, port = next(places_of(url))
        default = 443 if url.startswith("https") else 80
        if reason := _unreachable(host, int(port or default)):
            setting = f"generator.{config.generator.engine}"
            yield warning(
                f"{setting}.url: {url} does not answer ({reason}); generators wait for it for "
                f"{setting}.start_timeout_s"
            )


def check_secrets(config: RunConfig, origin: str | None) -> Iterator[Finding]:
    """Where the password of Redis is kept. `origin` is the place of buffer.url."""
    buffer = config.buffer
    if buffer.password_of_url and origin is not None and not origin.startswith("environment"):
        reader = (
            "other users of this machine" if origin.startswith("--set") else "readers of a file"
        )
        yield warning(
            f"buffer.url: holds a password, which {reader} can see; it is written nowhere else. "
            f"Give it as {REDIS_PASSWORD} in the environment, or as buffer.password_file"
        )
    if buffer.password_file is not None:
        yield from _check_private("buffer.password_file", buffer.password_file)


def check_listening(setting: str, address: str) -> Iterator[Finding]:
    host, port = host_of(address), port_of(address)
    try:
        bound_socket(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield warning(f"{setting}: {address} is in use; is another run using it?")
        elif error.errno == errno.EACCES:
            yield problem(f"{setting}: {address} may not be used by this user: {error.strerror}")
        else:
            yield warning(f"{setting}: {address} is not this machine's: {error.strerror}")


def _check_keys(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield problem(f"buffer.curve: there is no folder {folder}; `streamrl keys new` makes it")
        return
    for name in ("server.public", "client.public", "client.secret", "server.secret"):
        try:
            key = (folder / name).read_bytes().strip()
        except OSError as error:
            # Generators do not need it, and should not have it.
            kind = warning if name == "server.secret" else problem
            yield kind(
                f"buffer.curve: cannot read {folder / name} ({error.strerror}); `streamrl keys "
                "new FOLDER` makes the keys"
            )
            continue
        if len(key) != 40:
            yield problem(f"buffer.curve: {folder / name} holds no key of 40 characters")
        if name.endswith("secret"):
            yield from _check_private("buffer.curve", folder / name)


def _check_private(setting: str, file: Path) -> Iterator[Finding]:
    try:
        mode = file.stat().st_mode & 0o777
    except OSError as error:
        yield problem(f"{setting}: cannot read {file}: {error.strerror}")
        return
    if mode & 0o077:
        yield warning(
            f"{setting}: {file} has mode {mode:04o}, so that other users can read it: chmod 600"
        )


def _check_redis(config: RunConfig) -> Iterator[Finding]:
    if found := list(refusal(lambda: config.buffer.secret_url)):
        yield from found
        return
    url = config.buffer.url
    default = _REDIS_PORTS.get(url.partition("://")[0], 6379)
    reasons = [_unreachable(host, int(port or default)) for host, port in places_of(url)]
    if all(reasons):
        yield warning(f"buffer.url: no Redis answers at {url}: {reasons[0]}; start it")
        return
    limits = config.buffer.model_copy(update={"deadline_s": ANSWER_S})
    try:
        asyncio.run(_ask_buffer(config.model_copy(update={"buffer": limits})))
    except ConfigError as error:
        yield problem(str(error))
    except (StreamRLError, ImportError, TimeoutError) as error:
        yield warning(f"buffer.url: {url} does not answer as a buffer yet: {error}")


async def _ask_buffer(config: RunConfig) -> None:
    buffer = connect(config)
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            await buffer.stats()
    finally:
        await buffer.close()


def _unreachable(host: str, port: int) -> str:
    """Why no connection is made; "" if one is. Waits ANSWER_S."""
    try:
        with socket.create_connection((host, port), ANSWER_S):
            return ""
    except ConnectionRefusedError:
        return "nothing listens there"
    except socket.gaierror:
        return "the host is unknown"
    except OSError as error:
        return str(error)
