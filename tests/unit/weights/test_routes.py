"""Which route a version takes to each receiver."""

import os

import pytest

from actors.engines.weight_targets import weight_locality
from streamrl.config.generator import GeneratorSettings
from streamrl.config.weights import WeightSettings
from streamrl.errors import ConfigError
from streamrl.types import Locality
from streamrl.weights.locality import locality_of, this_host
from streamrl.weights.membership import Peer
from streamrl.weights.protocol import Hello
from streamrl.weights.routes import Routes


def cpu(host: str = "here") -> Locality:
    return Locality(host=host)


def gpu(*uuids: str, host: str = "here") -> Locality:
    return Locality(host=host, device_type="cuda", gpus=uuids)


def peer(name: str, locality: Locality, *, has_loaded: bool = True) -> Peer:
    hello = Hello(name, f"session of {name}", 1, "ours", locality)
    return Peer(name.encode(), hello, 0.0, has_loaded=has_loaded)


def routes(sender: Locality, *, shares: bool = True, **settings: object) -> Routes:
    return Routes(WeightSettings.model_validate(settings), sender, shares=shares)


def routes_of(made: Routes, *peers: Peer) -> dict[str, str]:
    """By name; a broadcast as its backend."""
    split = made.split(peers)
    by = {p.name: made.backend(split["broadcast"]) for p in split["broadcast"]}
    return {p.name: by.get(p.name, route) for route, to in split.items() for p in to}


@pytest.mark.parametrize(
    ("sender", "receivers", "expected"),
    [
        (cpu(), [cpu(), cpu()], ["shared memory", "shared memory"]),
        (cpu(), [cpu("there"), cpu("")], ["gloo", "gloo"]),
        (cpu(""), [cpu("")], ["gloo"]),
        (cpu(), [cpu(), cpu("there")], ["shared memory", "gloo"]),
        (cpu(), [gpu("A")], ["shared memory"]),
        (gpu("A"), [gpu("A"), gpu("A")], ["shared memory", "shared memory"]),
        (gpu("A"), [gpu("B"), gpu("C", "D", host="there")], ["nccl", "nccl"]),
        (gpu("A"), [gpu("A"), gpu("B")], ["shared memory", "nccl"]),
        (gpu("A"), [gpu("A", "B")], ["gloo"]),
        (gpu("A"), [gpu("B"), gpu("B")], ["gloo", "gloo"]),
        (gpu("A"), [gpu("A", host="there")], ["gloo"]),
        (gpu("A"), [Locality(device_type="cuda")], ["nccl"]),
        (gpu("A"), [cpu()], ["gloo"]),
        (gpu("A"), [gpu("A"), cpu(), gpu("B")], ["shared memory", "gloo", "gloo"]),
        (gpu(), [gpu()], ["nccl"]),
        (gpu(), [cpu()], ["gloo"]),
    ],
)
def test_auto_shares_what_can_be_shared_and_broadcasts_the_rest(sender, receivers, expected):
    peers = [peer(str(number), locality) for number, locality in enumerate(receivers)]
    found = routes_of(routes(sender), *peers)
    assert [found[p.name] for p in peers] == expected


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_backend_that_is_named_is_taken(backend):
    peers = [peer("a", gpu("A")), peer("b", cpu())]
    assert routes_of(routes(gpu("A"), backend=backend), *peers) == {"a": backend, "b": backend}


@pytest.mark.parametrize(
    ("hosts", "backend", "verify", "expected"),
    [
        (["here", "here"], "gloo", False, False),
        (["here", "there"], "gloo", False, True),
        ([""], "gloo", False, True),
        (["there"], "nccl", False, False),
        (["here"], "gloo", True, True),
        (["there"], "nccl", True, True),
    ],
)
def test_a_gloo_broadcast_carries_checksums_unless_it_stays_on_one_host(
    hosts, backend, verify, expected
):
    peers = [peer(str(number), cpu(host)) for number, host in enumerate(hosts)]
    assert routes(cpu(), verify=verify).verifies(peers, backend) is expected


def test_who_does_not_know_its_host_shares_it_with_nobody():
    assert routes(cpu("")).verifies([peer("a", cpu(""))], "gloo")


def test_files_come_first_where_they_are_asked_for():
    late, known = peer("late", cpu(), has_loaded=False), peer("known", cpu())
    made = routes(cpu())
    assert routes_of(made, late, known) == {"late": "shared memory", "known": "shared memory"}
    made.on_loaded()
    assert routes_of(made, late, known) == {"late": "file", "known": "shared memory"}
    made.on_file_answers([late], loaded=set())
    assert routes_of(made, late)["late"] == "shared memory"
    assert routes_of(routes(cpu(), transport="files"), known) == {"known": "file"}


def test_who_failed_to_share_gets_broadcasts_until_it_is_another_process(caplog):
    caplog.set_level("INFO")
    good, bad = peer("good", cpu()), peer("bad", cpu())
    made = routes(cpu())
    routes_of(made, good, bad)
    assert not made.on_shared_answers([good, bad], failed=set())
    assert made.on_shared_answers([good, bad], failed={"bad"})
    for _ in range(2):
        assert routes_of(made, good, bad) == {"good": "shared memory", "bad": "gloo"}
    assert [record.message for record in caplog.records] == [
        "good gets its weights by shared memory",
        "bad gets its weights by shared memory",
        "bad gets its weights by broadcast",
    ]
    again = Peer(b"bad", Hello("bad", "another", 0, "", cpu()), 0.0)
    assert routes_of(made, again) == {"bad": "shared memory"}


def test_shared_by_name_is_for_everybody_and_has_no_second_choice():
    far = peer("far", cpu("there"))
    made = routes(cpu(), backend="shared")
    assert routes_of(made, far) == {"far": "shared memory"}
    assert not made.on_shared_answers([far], failed={"far"})
    assert routes_of(made, far) == {"far": "shared memory"}


def test_where_memory_cannot_be_shared_auto_does_without_and_shared_is_refused():
    assert routes_of(routes(cpu(), shares=False), peer("a", cpu())) == {"a": "gloo"}
    with pytest.raises(ConfigError, match=r"weights\.backend shared: this system has no memory"):
        routes(cpu(), shares=False, backend="shared")


def test_a_host_is_a_machine_and_its_shared_memory():
    assert this_host().endswith(f"/{os.stat('/dev/shm').st_dev}")
    assert locality_of("cpu") == Locality(host=this_host())


@pytest.mark.parametrize(
    ("settings", "is_here"),
    [
        ({"engine": "hf"}, True),
        ({"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}, True),
        ({"engine": "vllm", "vllm": {"url": "http://node:8000"}}, False),
        ({"engine": "sglang"}, True),
        ({"engine": "sglang", "sglang": {"url": "http://node:30000"}}, True),
    ],
)
def test_an_engine_is_where_it_receives(settings, is_here):
    """SGLang's weights are received here in any case, and handed on."""
    generator = GeneratorSettings.model_validate({"device": "cpu", **settings})
    assert weight_locality(generator) == Locality(host=this_host() if is_here else "")
