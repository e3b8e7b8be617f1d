"""A plan: who gets which GPU, and the commands, environments and addresses that follow."""

import shlex

import pytest
from hypothesis import given, strategies as st

from streamrl.cli import plan as plan_command
from streamrl.cli.main import main
from streamrl.cli.plan import print_plan
from streamrl.cli.processes import restarts
from streamrl.cli.processes.daemons import make_children
from streamrl.errors import ConfigError
from streamrl.placement.make_plan import make_plan
from streamrl.placement.memory import Fit
from streamrl.placement.plan import Device, Host, Plan
from streamrl.placement.seats import Seat
from tests.unit.placement.plans import configured, one_host, several


def placed(plan: Plan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {p.name: (p.host, p.devices) for p in plan.processes if p.role != "buffer"}


def on_one(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {name: devices for name, (_, devices) in placed(plan).items()}


def vllm(count: int = 1, size: int = 1) -> dict[str, object]:
    return {"count": count, "engine": "vllm", "vllm": {"tensor_parallel_size": size}}


def test_addresses_of_ipv6_are_shown_as_they_are(capsys):
    plan = make_plan(configured(weights={"address": "tcp://[fd00::a]:1"}), one_host(1))
    print_plan(plan)
    assert "weights.address tcp://[fd00::a]:1" in capsys.readouterr().out


@pytest.mark.parametrize(("gib", "size"), [(40, "40 GiB"), (None, "unknown memory")])
def test_gpus_of_a_machine_that_is_not_this_one_are_as_large_as_its_first(
    gib, size, monkeypatch, capsys
):
    (here,) = one_host(0) if gib is None else one_host(1, gib)
    monkeypatch.setattr(plan_command, "this_machine", lambda: here)
    command = ["plan", "configs/quickstart.yaml", "--gpus"]
    assert main([*command, "2"]) == main([*command, "0"]) == 0
    output = capsys.readouterr().out
    assert f"here: GPU 0 of {size}, GPU 1 of {size}, 16 cores" in output
    assert "here: no GPU, 16 cores" in output


@pytest.mark.parametrize(
    ("num_gpus", "seats"),
    [
        (1, {"learner": (0,), "generator-0": (0,), "generator-1": (0,)}),
        (2, {"learner": (0,), "generator-0": (1,), "generator-1": (1,)}),
        (4, {"learner": (0,), "generator-0": (1,), "generator-1": (2,)}),
    ],
)
def test_each_process_has_a_gpu_of_its_own_while_there_are_enough(num_gpus, seats):
    assert on_one(make_plan(configured(generator={"count": 2}), one_host(num_gpus))) == seats


def test_ranks_come_first_then_engines_of_several_gpus_then_the_validator():
    config = configured(learner={"num_ranks": 2}, generator=vllm(2, 2), validation={"every": 1})
    plan = make_plan(config, one_host(8))
    assert on_one(plan) == {
        "learner": (0, 1),
        "generator-0": (2, 3),
        "generator-1": (4, 5),
        "validator": (6, 7),
    }
    assert plan.notes == ()
    assert [p.is_optional for p in plan.processes] == [False, False, False, False, True]


def test_a_validator_that_no_setting_asks_for_is_there_where_a_host_may_have_it():
    config = configured(data={"source": "copy", "eval_source": "copy"})
    assert "validator" in on_one(make_plan(config, one_host(2)))
    processes = make_plan(config, one_host(0)).processes
    threads = {p.name: p.environment.get("OMP_NUM_THREADS") for p in processes}
    # Of 16 cores, since it rests nearly all the time.
    assert threads == {"buffer": None, "learner": "8", "generator-0": "8", "validator": "8"}
    hosts = (Host("a", "a", roles=("buffer", "learner", "generator")),)
    assert "validator" not in {p.role for p in make_plan(config, hosts).processes}


def test_an_engine_shares_with_engines_before_it_shares_with_a_learner():
    plan = make_plan(configured(generator=vllm(3, 2)), one_host(3))
    assert set(on_one(plan).values()) == {(0,), (1, 2)}


def test_the_ranks_fill_one_host_after_the_other_and_engines_stay_on_one():
    config = configured(learner={"num_ranks": 6}, generator=vllm(3, 4))
    assert placed(make_plan(config, several(4, 4, 8))) == {
        "learner": ("host-0", (0, 1, 2, 3)),
        "learner-host-1": ("host-1", (0, 1)),
        "generator-0": ("host-2", (0, 1, 2, 3)),
        "generator-1": ("host-2", (4, 5, 6, 7)),
        "generator-2": ("host-2", (0, 1, 2, 3)),
    }


def test_blocks_of_ranks_that_share_tokens_stay_on_one_host():
    mesh = {"num_ranks": 4, "mesh": {"sequence": 2}}
    plan = make_plan(configured(learner=mesh), several(3, 3))
    assert placed(plan)["learner"] == ("host-0", (0, 1))
    assert placed(plan)["learner-host-1"] == ("host-1", (0, 1))
    with pytest.raises(
        ConfigError, match=r"learner\.num_ranks: was 8, .*in blocks of .*sequence 4"
    ):
        make_plan(configured(learner={"num_ranks": 8, "mesh": {"sequence": 4}}), several(3, 3, 3))


def test_sixteen_nodes_take_a_learner_of_64_ranks_and_16_engines_without_sharing():
    config = configured(learner={"num_ranks": 64, "groups_per_step": 64}, generator=vllm(16, 4))
    plan = make_plan(config, several(*[8] * 16))
    learners = [p for p in plan.processes if p.role == "learner"]
    assert [(p.host, p.num_ranks) for p in learners] == [(f"host-{i}", 8) for i in range(8)]
    assert {p.host for p in plan.processes if p.role == "generator"} == {
        f"host-{i}" for i in range(8, 16)
    }
    used = [(p.host, d) for p in plan.processes for d in p.devices]
    assert len(used) == len(set(used)) == 128


def test_the_place_of_each_process_is_looked_at_once(monkeypatch):
    overrides, looked = Fit.overrides, []

    def counted(self: Fit, seat: Seat) -> dict[str, str]:
        looked.append(seat.name)
        return overrides(self, seat)

    monkeypatch.setattr(Fit, "overrides", counted)
    plan = make_plan(configured(generator=vllm(14)), several(8, 8))
    assert sorted(looked) == sorted(process.name for process in plan.processes)


@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    num_ranks=st.integers(1, 12),
    num_generators=st.integers(1, 10),
    size=st.sampled_from([1, 2, 4, 8]),
)
def test_a_plan_places_all_or_is_refused_and_shares_only_where_it_must(
    counts, num_ranks, num_generators, size
):
    config = configured(
        learner={"num_ranks": num_ranks, "groups_per_step": 16},
        generator=vllm(num_generators, size),
    )
    hosts = several(*counts)
    if 0 < sum(counts) < num_ranks or 0 < max(counts) < size:
        with pytest.raises(ConfigError):
            make_plan(config, hosts)
        return
    plan = make_plan(config, hosts)
    assert plan == make_plan(config, hosts)
    learners = [p for p in plan.processes if p.role == "learner"]
    engines = [p for p in plan.processes if p.role == "generator"]
    assert sum(p.num_ranks for p in learners) == num_ranks
    assert len(engines) == num_generators
    if not any(counts):
        assert all(p.devices == () for p in plan.processes)
        return
    assert all(len(p.devices) == size for p in engines)
    held = {(host.name, d.index) for host in hosts for d in host.devices}
    of_ranks = [(p.host, d) for p in learners for d in p.devices]
    assert len(of_ranks) == len(set(of_ranks)) == num_ranks
    used = [*of_ranks, *((p.host, d) for p in engines for d in p.devices)]
    assert set(used) <= held
    if len(used) > len(set(used)):
        free = held - set(used)
        assert all(sum(h == host.name for h, _ in free) < size for host in hosts)


def test_without_gpus_everything_runs_on_the_cpu_with_its_share_of_the_cores():
    config = configured(generator={"count": 3}, buffer={})
    plan = make_plan(config, one_host(0), resume=True)
    assert [shlex.join(p.command) for p in plan.processes] == [
        "streamrl buffer --config runs/x/config.yaml",
        "streamrl learner --config runs/x/config.yaml --resume",
        *(f"streamrl generator --config runs/x/config.yaml --id generator-{i}" for i in range(3)),
    ]
    shares = [dict(p.environment) for p in plan.processes]
    assert shares == [{}, *[{"OMP_NUM_THREADS": "4"}] * 4]
    assert plan.config == config
    (learner,) = (p for p in make_plan(config, one_host(0)).processes if p.role == "learner")
    assert "--resume" not in learner.command
    assert learner.restart_command[-1] == "--resume"


def test_cpu_ranks_are_spread_over_the_hosts_for_learners():
    plan = make_plan(configured(learner={"num_ranks": 3}), several(0, 0))
    assert [(p.host, p.num_ranks) for p in plan.processes if p.role == "learner"] == [
        ("host-0", 2),
        ("host-1", 1),
    ]
    assert placed(plan)["generator-0"][0] == "host-1"


def test_a_device_that_a_setting_names_is_found_among_all_of_the_host():
    config = configured(learner={"device": "cuda:1"}, generator={"device": "cpu"})
    host = Host("here", "127.0.0.1", (Device(4), Device(6)), 8)
    learner, generator = make_plan(config, (host,)).processes[1:]
    assert learner.devices == (6,)
    assert learner.environment["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert "CUDA_VISIBLE_DEVICES" not in generator.environment
    assert generator.devices == ()


def test_parts_of_gpus_are_named_by_their_uuid():
    parts = (Device(0, visible_as="MIG-a"), Device(1, visible_as="MIG-b"))
    plan = make_plan(configured(), (Host("here", "127.0.0.1", parts, 8),))
    visible = [p.environment.get("CUDA_VISIBLE_DEVICES") for p in plan.processes]
    assert visible == [None, "MIG-a", "MIG-b"]


def test_a_host_whose_gpus_are_not_counted_leaves_the_choice_to_the_processes():
    config = configured(learner={"device": "cuda"}, generator={"device": "cuda:3"})
    plan = make_plan(config, one_host(0, is_counted=False))
    assert all("CUDA_VISIBLE_DEVICES" not in p.environment for p in plan.processes)
    assert all(p.devices == () for p in plan.processes)


def test_an_engine_elsewhere_takes_no_gpu():
    elsewhere = {"engine": "vllm", "vllm": {"url": "http://gpu:8000"}}
    plan = make_plan(configured(generator=elsewhere), one_host(2))
    assert on_one(plan) == {"learner": (0,), "generator-0": ()}


def test_several_hosts_get_addresses_ports_interfaces_and_torchrun():
    first, second = several(2, 2)
    hosts = (
        Host(first.name, first.address, first.devices, 8, interface="eth1"),
        Host(second.name, "fd00::2", second.devices, 0),
    )
    config = configured(
        learner={"num_ranks": 3}, cluster={"first_port": 4000}, weights={"dtype": "bfloat16"}
    )
    plan = make_plan(config, hosts)
    assert plan.config.buffer.url == "zmq://10.0.0.1:4000"
    assert plan.config.weights.address == "tcp://10.0.0.1:4001"
    assert plan.config.weights.dtype == "bfloat16"
    buffer, one, other, generator = plan.processes
    assert shlex.join(one.command) == (
        "streamrl torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=10.0.0.1 "
        "--master-port=4002 --rdzv-id=x --rdzv-conf=timeout=900 --no-python "
        "streamrl learner --config runs/x/config.yaml"
    )
    assert "--node-rank=1" in other.command
    assert "--nproc-per-node=1" in other.command
    assert other.name == "learner-host-1"
    assert dict(one.environment) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "4",
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
    }
    assert dict(generator.environment) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert (generator.host, buffer.environment) == ("host-1", {})


def test_addresses_that_were_given_decide_who_is_there():
    config = configured(
        buffer={"url": "zmq://10.0.0.2:7000", "curve": "keys"},
        weights={"address": "tcp://10.0.0.3:7001"},
    )
    plan = make_plan(config, several(1, 1, 1))
    assert [(p.name, p.host) for p in plan.processes] == [
        ("buffer", "host-1"),
        ("learner", "host-2"),
        ("generator-0", "host-0"),
    ]
    assert (plan.config.buffer.url, plan.config.weights.address) == (
        "zmq://10.0.0.2:7000",
        "tcp://10.0.0.3:7001",
    )


def test_hosts_with_generators_of_their_own_get_so_many():
    hosts = several(1, 4, 4)
    hosts = (hosts[0], Host("spot", "10.0.0.9", hosts[1].devices, 8, generators=1), hosts[2])
    plan = make_plan(configured(generator={"count": 3}), hosts)
    assert [placed(plan)[f"generator-{i}"][0] for i in range(3)] == ["spot", "host-2", "host-2"]
    fixed = (Host("a", "a", roles=("learner", "buffer")), Host("b", "b", generators=4))
    plan = make_plan(configured(generator={"count": 2}), fixed)
    assert plan.config.generator.count == 4


def test_gpus_that_nothing_uses_are_noted():
    (note,) = make_plan(configured(), one_host(4)).notes
    assert note.sentence.startswith("generator.count: nothing uses GPU 2, 3 here")


REFUSED = [
    (
        {"generator": vllm(1, 8)},
        several(4, 2),
        r"tensor_parallel_size: was 8, and host-0 has 4 GPUs",
    ),
    ({"learner": {"num_ranks": 3}}, one_host(2), r"learner\.num_ranks: was 3, .* there are 2 GPUs"),
    (
        {"learner": {"device": "cuda"}},
        several(0, 0),
        r"learner\.device: was 'cuda', and host-0 has 0",
    ),
    (
        {"generator": {"device": "cuda:2"}},
        one_host(2),
        r"generator\.device: was 'cuda:2', and there",
    ),
    (
        {"buffer": {"url": "redis://localhost", "curve": "k"}},
        several(1, 1),
        r"buffer\.url: was 'redis://localhost', which is another machine on each host",
    ),
    (
        {"buffer": {"url": "zmq://10.9.9.9:1", "curve": "k"}},
        several(1, 1),
        r"buffer\.url: was 'zmq://10\.9\.9\.9:1', which is the address of no host",
    ),
    (
        {"weights": {"address": "tcp://10.0.0.1:0"}},
        several(0, 1),
        r"weights\.address: was 'tcp://10\.0\.0\.1:0', and .* is on host-1 \(10\.0\.0\.2\)",
    ),
    (
        {"weights": {"address": "tcp://a:0"}},
        (Host("a", "a", roles=("generator", "buffer")), Host("b", "b", roles=("learner",))),
        r"weights\.address: was 'tcp://a:0', which is the address of no host .* it \(b\)",
    ),
    (
        {"learner": {"num_ranks": 4, "mesh": {"shard": 3}}},
        one_host(4),
        r"learner\.mesh: .* is 3, but the learner has 4 ranks",
    ),
]


@pytest.mark.parametrize(("sections", "hosts", "sentence"), REFUSED, ids=[s for *_, s in REFUSED])
def test_what_has_no_place_is_refused_by_name(sections, hosts, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        make_plan(configured(**sections), hosts)
    assert "\n" not in str(refused.value)


async def test_a_launch_on_two_gpus_starts_learner_and_generator_on_one_each(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    program = tmp_path / "streamrl"
    program.write_text('#!/bin/sh\necho "$1 on $CUDA_VISIBLE_DEVICES"\n')
    program.chmod(0o755)
    monkeypatch.setattr(restarts, "executable", lambda: str(program))
    plan = make_plan(configured(run={"name": "x", "folder": tmp_path}), one_host(2))
    for one in make_children(restarts.Child, plan, print, lambda _: {}):
        assert await one._run() == (0, None)
    logs = [(tmp_path / "x" / "logs" / f"{p.name}.log").read_text() for p in plan.processes]
    assert logs == ["buffer on 0,1\n", "learner on 0\n", "generator on 1\n"]
