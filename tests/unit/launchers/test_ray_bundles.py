"""From a configuration to the bundles of a Ray cluster, and what is refused; no cluster."""

import sys

import pytest
from pydantic import ValidationError

from streamrl.cli.launchers import launcher
from streamrl.cli.launchers.ray.bundles import (
    Room,
    engine_bundles,
    host_of,
    learner_bundles,
    missing,
)
from streamrl.cli.launchers.ray.files import MAX_BYTES, archive, handed_on, required
from streamrl.config.generator import GeneratorSettings
from streamrl.errors import ConfigError
from streamrl.placement.make_plan import make_plan
from tests.unit.placement.plans import configured

VLLM = {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}


def needs(*bundles):
    return {bundle.name: bundle.needs for bundle in bundles}


@pytest.mark.parametrize(
    ("learner", "rooms", "expected"),
    [
        ({}, [Room(0, 8)], {"learner": Room(0, 2)}),
        ({}, [Room(0, 8), Room(8, 96)], {"learner": Room(1, 2)}),
        ({"device": "cpu"}, [Room(8, 96)], {"learner": Room(0, 2)}),
        ({"device": "cuda", "num_ranks": 8}, [Room(0, 4)], {"learner": Room(8, 9)}),
        ({"num_ranks": 8}, [Room(8, 96)], {"learner": Room(8, 9)}),
        (
            {"num_ranks": 12},
            [Room(8, 96)] * 3,
            {"learner": Room(6, 7), "learner-host-1": Room(6, 6)},
        ),
        (
            {"num_ranks": 4, "mesh": {"tensor": 2}},
            [Room(3, 8)] * 2,
            {"learner": Room(2, 3), "learner-host-1": Room(2, 2)},
        ),
        ({"num_ranks": 2}, [Room(0, 2)], {"learner": Room(0, 2), "learner-host-1": Room(0, 1)}),
    ],
)
def test_ranks_share_as_few_nodes_as_hold_them(learner, rooms, expected):
    assert needs(*learner_bundles(configured(learner=learner), rooms)) == expected


def test_each_engine_has_a_bundle_of_its_own():
    config = configured(generator={**VLLM, "count": "1..2"}, validation={"every": 1})
    engines = list(engine_bundles(config, [Room(4, 32)]))
    assert needs(*engines) == {
        "generator-0": Room(2, 1),
        "generator-1": Room(2, 1),
        "validator": Room(2, 1),
    }
    assert engines[0].resources == {"CPU": 1.0, "GPU": 2.0}
    unasked = configured(data={"source": "copy", "eval_source": "copy"})
    assert "validator" in needs(*engine_bundles(unasked, [Room(0, 2)])), "by default, as elsewhere"
    assert Room(0, 1) in needs(*engine_bundles(configured(), [Room(0, 2)])).values()


def test_the_plan_takes_the_nodes_that_are_there_and_waits_for_the_others():
    config = configured(
        learner={"num_ranks": 2},
        generator={**VLLM, "count": "1..3"},
        buffer={"curve": "keys", "url": "zmq://127.0.0.1:0"},
        cluster={"first_port": 21_000},
    )
    rooms = [Room(4, 32)]
    bundles = [*learner_bundles(config, rooms), *engine_bundles(config, rooms)]
    found = {
        "address": "10.0.0.7",
        "num_cores": 8,
        "devices": [(0, 0, "", "2"), (1, 0, "", "3")],
    }
    hosts = [host_of(b, found if b.name == "learner" else {}) for b in bundles]
    plan = make_plan(config, hosts)
    assert {p.name: p.host for p in plan.processes} == {
        "buffer": "learner",
        "learner": "learner",
        **{f"generator-{i}": f"generator-{i}" for i in range(3)},
    }
    assert plan.config.buffer.url == "zmq://10.0.0.7:21000"
    assert plan.config.weights.address == "tcp://10.0.0.7:21001"
    assert plan.config.generator.count == "1..3"
    assert next(p for p in plan.processes if p.name == "generator-2").devices == (0, 1)


@pytest.mark.parametrize(
    ("rooms", "sentence"),
    [
        ([], "learner needs 2 GPUs and 3 CPUs of one node, and the largest has 0 CPUs"),
        ([Room(1, 8)], "the largest has 1 GPU and 8 CPUs"),
        ([Room(2, 8)], "which the cluster has, and others use"),
    ],
)
def test_what_is_missing_is_one_sentence(rooms, sentence):
    config = configured(learner={"num_ranks": 2})
    assert sentence in missing(learner_bundles(config, [Room(2, 8)]), rooms)


@pytest.mark.parametrize(
    ("count", "least", "most"), [(3, 1, 3), ("3", 1, 3), ("2..8", 2, 8), ("4..4", 4, 4)]
)
def test_a_count_of_generators_may_be_a_range(count, least, most):
    settings = GeneratorSettings(count=count)
    assert (settings.min_count, settings.max_count) == (least, most)


@pytest.mark.parametrize("count", [0, -1, "8..2", "0..3", "1..", "many", "1..2..3", "1.5"])
def test_no_other_count_is_taken(count):
    with pytest.raises(ValidationError, match=f"was {count!r}"):
        GeneratorSettings(count=count)


def test_relative_files_are_sent_with_the_code_beside_them_and_absolute_ones_required(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("reward.py", "beside.py"):
        (tmp_path / name).write_text("def score(episodes): return [0.0 for _ in episodes]\n")
    (tmp_path / "model").mkdir()
    data = {"source": "chain", "reward": "reward.py:score"}
    config = configured(data=data, model={"path": str(tmp_path / "model")})
    sent = archive(config)
    assert b"reward.py" in sent
    assert b"beside.py" in sent
    assert required(config) == (str(tmp_path / "model"),)


def test_the_keys_that_settings_name_reach_the_nodes_and_nothing_else_does(monkeypatch):
    names = ("SERVER_KEY", "JUDGE_KEY", "CODER_KEY", "TASK_TOKEN", "WANDB_API_KEY")
    for name in (*names, "OTHER_KEY"):
        monkeypatch.setenv(name, f"the {name}")
    teachers = [
        {"name": "a", "path": "m"},
        {"name": "b", "url": "http://b", "api_key_env": "CODER_KEY"},
    ]
    judge = {"reward": "judge", "kwargs": {"url": "http://j", "api_key_env": "JUDGE_KEY"}}
    config = configured(
        data={"source": "chain", "rewards": [judge]},
        algorithm={"distillation": {"teachers": teachers}},
        generator={
            "engine": "vllm",
            "vllm": {"url": "http://v:1", "api_key_env": "SERVER_KEY"},
            "agent": {"command": "work {prompt}", "token_env": "TASK_TOKEN"},
            "environment": "agent",
        },
    )
    assert handed_on(config) == {name: f"the {name}" for name in names}


def test_files_that_are_too_large_to_send_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ConfigError, match=r"the largest is model/model\.safetensors: put it"):
        archive(configured(model={"path": "model"}))


def test_without_ray_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("streamrl.cli.launchers.ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"needs ray, which is not .*: pip install 'streamrl\[ray"
    ):
        launcher("ray")


def test_a_cluster_of_another_version_is_refused_with_what_ray_says(monkeypatch):
    ray = pytest.importorskip("ray")
    from streamrl.cli.launchers.ray.cluster import connected

    def init(**_):
        # What Ray 2.60 says.
        raise RuntimeError(
            "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n"
            "    Python: 3.11.7\nThis process on node 10.0.0.1 was started with:\n"
            "    Ray: 2.60.0\n    Python: 3.12.1\n"
        )

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(ConfigError, match=r"the same Ray and Python .*: 2\.50\.0 .*: 2\.60\.0"),
        connected("auto"),
    ):
        pass
