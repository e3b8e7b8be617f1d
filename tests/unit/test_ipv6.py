"""What listens and connects takes an IPv6 address."""

import re
import socket

import pytest
import zmq

from streamrl.config import load_config
from streamrl.config.addresses import address_family, address_towards, url_host
from streamrl.curve import CurveServer, choose_family, make_keys, set_client_keys
from streamrl.placement import hosts
from streamrl.run_folder import prepare
from streamrl.weights.transports.groups import (
    OpenStore,
    RendezvousServer,
    RendezvousStore,
)

HOST = "::1"


@pytest.fixture(autouse=True)
def _needs_ipv6():
    try:
        socket.create_server((HOST, 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")


def test_a_client_with_keys_reaches_its_server(tmp_path):
    make_keys(tmp_path / "keys")
    url = f"tcp://{url_host(HOST)}:0"
    with zmq.Context() as context, context.socket(zmq.REP) as server:
        keys = CurveServer(context, url, tmp_path / "keys")
        keys.configure(server)
        server.bind(url)
        with zmq.Context.instance().socket(zmq.REQ) as client:
            bound = server.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
            set_client_keys(client, bound, tmp_path / "keys")
            client.connect(bound)
            client.send(b"question")
            assert server.poll(120_000)
            client.setsockopt(zmq.LINGER, 0)
        keys.close()


def test_a_launch_picks_ports_of_the_address_s_family(tmp_path):
    urls = ["buffer.url=zmq://[::1]:0", "weights.address=tcp://[::1]:0"]
    settings = ["model.path=m", "data.source=copy", f"run.folder={tmp_path}", *urls]
    (tmp_path / "run.yaml").touch()
    config = load_config(tmp_path / "run.yaml", settings, {}).config
    resolved = prepare(config, resume=False, new=False)
    assert re.fullmatch(r"zmq://\[::1\]:[1-9]\d+", resolved.buffer.url)
    assert re.fullmatch(r"tcp://\[::1\]:[1-9]\d+", resolved.weights.address)


def test_a_member_finds_the_groups_rendezvous():
    server = RendezvousServer(HOST)
    store = RendezvousStore(HOST, server.port, server.key, 5.0)
    store.set("rank", b"1")
    assert store.get("rank") == b"1"
    store.close()
    server.close()


def test_the_address_towards_a_peer_is_of_its_family():
    assert address_towards(HOST) == HOST
    assert OpenStore(HOST, 5.0).port > 0


def test_a_name_without_an_ipv4_address_is_ipv6(monkeypatch):
    names = {"six": [socket.AF_INET6], "both": [socket.AF_INET6, socket.AF_INET]}
    asked = []

    def resolve(host, port):
        asked.append(host)
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(family, socket.SOCK_STREAM, 0, "", ()) for family in names[host]]

    monkeypatch.setattr("streamrl.config.addresses.socket.getaddrinfo", resolve)
    assert address_family("six") == socket.AF_INET6
    assert address_family("both") == address_family("unknown") == socket.AF_INET
    assert address_family("127.0.0.1") == address_family("localhost") == socket.AF_INET
    assert address_family(HOST) == socket.AF_INET6
    assert asked == ["six", "both", "unknown"]
    with zmq.Context.instance().socket(zmq.REQ) as client:
        choose_family(client, "zmq://six:1")
        assert client.getsockopt(zmq.IPV6) == 1


def test_the_interface_of_an_address_is_found(tmp_path, monkeypatch):
    listed = tmp_path / "if_inet6"
    listed.write_text(
        f"{1:032x} 01 80 10 80       lo\nfd00{0x77:024x}{2:04x} 02 40 00 80     eth0\n"
    )
    monkeypatch.setattr(hosts, "_IPV6_ADDRESSES", listed)
    assert hosts.interface_of("fd00:0:0:0:0:0:77:2") == "eth0"
    assert hosts.interface_of("fd00::78:2") == hosts.interface_of("a-name:x") == ""
