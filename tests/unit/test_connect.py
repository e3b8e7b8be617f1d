"""One URL chooses the backend; what a person gets wrong about it is said in a sentence."""

import argparse
import subprocess
import sys
from functools import partial

import pytest

from actors.daemon import generate
from actors.validation import validate
from buffers.connect import connect
from buffers.daemon import address_beside, serve
from buffers.redis.client import RedisBuffer
from buffers.redis.connection import namespace
from buffers.redis.topology import open_client, redacted
from buffers.zmq.client import ZmqBuffer
from streamrl.cli.buffer import running
from streamrl.cli.processes.daemons import make_children
from streamrl.cli.processes.restarts import Child
from streamrl.config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.placement.hosts import this_machine
from streamrl.placement.make_plan import make_plan
from streamrl.run_folder import prepare
from streamrl.shutdown import Shutdown


def configured(tmp_path, url: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: some-model}\ndata: {source: addition}\n")
    return load_config(path, [f"buffer.url={url}", f"run.folder={tmp_path}"], {}).config


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("zmq://127.0.0.1:1", ZmqBuffer),
        ("redis://127.0.0.1:1/3", RedisBuffer),
        ("rediss://user:pw@127.0.0.1:1", RedisBuffer),
        ("redis+sentinel://a,b:1/service", RedisBuffer),
        ("redis+cluster://a:1,b:1", RedisBuffer),
    ],
)
async def test_the_url_chooses_the_backend(tmp_path, url, kind):
    buffer = connect(configured(tmp_path, url))
    assert isinstance(buffer, kind)
    await buffer.close()


async def test_a_backend_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must start with zmq://, redis://"):
        configured(tmp_path, "memory://")
    with pytest.raises(ConfigError, match="only `streamrl launch` resolves"):
        connect(configured(tmp_path, "zmq://127.0.0.1:0"))


@pytest.mark.parametrize(
    ("daemon", "missing"),
    [
        (serve, "buffer.url"),
        (partial(generate, generator_id="g"), "buffer.url"),
        (partial(generate, generator_id="g"), "weights.address"),
        (validate, "weights.address"),
    ],
)
async def test_a_daemon_asks_first_for_the_ports_that_a_launch_picks(tmp_path, daemon, missing):
    """A generator loads its model for minutes."""
    ports = {"buffer": {"url": "zmq://127.0.0.1:1"}, "weights": {"address": "tcp://127.0.0.1:2"}}
    section, field = missing.split(".")
    ports[section] = {field: f"{ports[section][field][:-1]}0"}
    config = configured(tmp_path, "zmq://127.0.0.1:1").with_values(validation={"every": 1}, **ports)
    with pytest.raises(ConfigError, match=rf"^{missing} \S+:0 has port 0, which only"):
        await daemon(config, shutdown=Shutdown())


def test_a_missing_client_of_redis_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install .streamrl\[redis\]"):
        connect(configured(tmp_path, "redis://127.0.0.1:1"))


def test_a_url_that_redis_cannot_read_is_refused_without_its_password():
    for url in ("redis://:secret@host:port/0", "redis+sentinel://:secret@host"):
        with pytest.raises(ConfigError, match=r"buffer\.url .*:\*\*\*@host") as caught:
            open_client(url)
        assert "secret" not in str(caught.value)


def test_a_password_is_not_shown():
    assert redacted("redis://user:secret@host/0?password=x") == "redis://user:***@host/0"
    assert redacted("redis://host:1/0") == "redis://host:1/0"


async def test_tls_and_users_come_from_the_url():
    pool = open_client("rediss://user:p%40ss@host:1/2?ssl_ca_certs=ca.pem").connection_pool
    settings = pool.connection_kwargs
    assert pool.connection_class.__name__ == "SSLConnection"
    assert (settings["username"], settings["password"], settings["db"]) == ("user", "p@ss", 2)
    assert settings["ssl_ca_certs"] == "ca.pem"


def test_the_keys_of_a_run_share_a_hash_tag():
    assert namespace("my.run-1") == "streamrl:{my.run-1}:"


async def test_a_run_in_redis_has_a_daemon_at_an_address_of_its_own(tmp_path):
    config = configured(tmp_path, "redis://:secret@127.0.0.1:1")
    plan = make_plan(config, [this_machine()])
    assert "buffer" in [child.role for child in make_children(Child, plan, print, lambda _: {})]
    assert prepare(config, resume=False, new=False).buffer == config.buffer
    assert address_beside(config.buffer.url) == "zmq://127.0.0.1:0"
    with pytest.raises(ConfigError, match=r"buffer\.url: nowhere\.invalid cannot be reached"):
        address_beside("redis://nowhere.invalid:6379/0")


async def test_a_run_in_its_folder_has_nothing_to_forget_elsewhere(tmp_path):
    configured(tmp_path, "zmq://127.0.0.1:1")
    given = argparse.Namespace(file=str(tmp_path / "run.yaml"), config=None, overrides=[])
    with pytest.raises(ConfigError, match="streamrl launch --new moves it aside"):
        await running.books(given)


def test_who_needs_no_redis_does_not_import_it():
    modules = "buffers.connect, buffers.daemon, streamrl.cli.buffer.running"
    code = f"import sys, {modules}; print('redis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
