"""What `streamrl check` says of the memory of a run's processes: the planner's own model."""

import json
from pathlib import Path

import pytest

from streamrl.cli.check import settings
from streamrl.cli.check.machine import Machine
from streamrl.cli.check.settings import check_engine_device
from streamrl.cli.plan import print_plan
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.findings import MEMORY, Finding, Severity
from streamrl.placement.hosts import visible_alone
from streamrl.placement.make_plan import make_plan
from streamrl.placement.plan import Host
from tests.unit.placement.plans import configured, one_host

SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return configured(model={"path": str(tmp_path)})


def of_memory(
    config: RunConfig, hosts: tuple[Host, ...], monkeypatch: pytest.MonkeyPatch
) -> list[Finding]:
    monkeypatch.setattr(settings, "this_machine", lambda: hosts[0])
    return [finding for finding in settings.check_devices(config) if finding.area is MEMORY]


def test_each_process_on_a_gpu_is_said_with_what_it_needs(config, monkeypatch):
    learner, generator = of_memory(config, one_host(2, 80), monkeypatch)
    assert {learner.severity, generator.severity} == {Severity.OK}
    assert learner.sentence.startswith("learner needs about ")
    assert "GiB on GPU 0 here: " in learner.sentence
    assert "optimizer " in learner.sentence
    assert "KV cache of one sequence" in generator.sentence
    assert (learner.cause, generator.cause) == ("learner", "generator-0")


def test_what_may_not_fit_is_a_warning_and_what_cannot_a_problem(config, monkeypatch):
    plan = make_plan(config, one_host(2))
    need = plan.processes[1].memory
    assert need is not None
    tight = -(-need.certain_bytes // 2**30)
    assert tight * 2**30 < need.num_bytes
    (warning, *needs) = of_memory(config, one_host(2, tight), monkeypatch)
    assert (warning.severity, warning.cause) == (Severity.WARNING, "learner.device")
    assert [f.cause for f in needs if f.severity is Severity.OK] == ["learner", "generator-0"]
    (problem,) = of_memory(config, one_host(2, tight - 1), monkeypatch)
    assert (problem.severity, problem.cause) == (Severity.PROBLEM, "learner.device")
    with pytest.raises(ConfigError) as refusal:
        make_plan(config, one_host(2, tight - 1))
    assert str(refusal.value) == problem.sentence, "a launch refuses it in the same words"


@pytest.mark.parametrize(
    ("gib", "num_generators", "remedy"),
    [(64, 1, ""), (64, 9, "lower generator.count, or name"), (8, 1, ": name")],
)
def test_processes_without_a_gpu_are_warned_of_what_certainly_exceeds_the_memory(
    config, monkeypatch, gib, num_generators, remedy
):
    monkeypatch.setattr(settings, "read_machine", lambda: Machine(memory=gib * 2**30))
    generator = config.generator.model_copy(update={"count": num_generators})
    found = of_memory(config.model_copy(update={"generator": generator}), one_host(0), monkeypatch)
    assert [finding.severity for finding in found] == [Severity.WARNING] * bool(remedy)
    assert all(finding.sentence.endswith(f"{remedy} a smaller model") for finding in found)


def test_the_first_rank_alone_needs_memory_to_send_weights(config, monkeypatch):
    monkeypatch.setattr(settings, "read_machine", lambda: Machine(memory=64 * 2**30))
    learner = config.learner.model_copy(update={"num_ranks": 8})
    assert of_memory(config.model_copy(update={"learner": learner}), one_host(0), monkeypatch) == []


@pytest.mark.parametrize(("num_gpus", "engine"), [(2, "hf"), (2, "vllm"), (0, "hf")])
def test_the_engine_for_cpus_is_warned_of_on_a_gpu(config, monkeypatch, num_gpus, engine):
    changed = {"generator": config.generator.model_copy(update={"engine": engine})}
    hosts = one_host(num_gpus, 80)
    monkeypatch.setattr(settings, "this_machine", lambda: hosts[0])
    found = settings.check_devices(config.model_copy(update=changed))
    said = [f for f in found if f.sentence.startswith("generator.engine: hf generates on a GPU")]
    assert [f.severity for f in said] == [Severity.WARNING] * (num_gpus > 0 and engine == "hf")


def test_a_plan_has_what_a_launch_starts_and_says_nothing_of_memory(config, capsys):
    print_plan(make_plan(config, one_host(4, 80)))
    printed = capsys.readouterr().out
    assert "streamrl" in printed
    assert "learner" in printed
    for part in ("optimizer", "KV cache", "nothing uses", "needs"):
        assert part not in printed


@pytest.mark.parametrize(
    ("device", "size", "refused"),
    [
        ("cuda", 2, ""),
        ("cuda:1", 1, ""),
        ("cuda:1", 2, "which is one GPU, and an engine of vllm takes 2 by its own settings"),
        ("cpu", 1, "vllm takes the devices that it finds"),
    ],
)
def test_an_engine_that_takes_what_it_finds_can_be_given_one_gpu(device, size, refused):
    vllm = {"tensor_parallel_size": size}
    config = configured(generator={"engine": "vllm", "device": device, "vllm": vllm})
    said = [finding.sentence for finding in check_engine_device(config)]
    assert [refused in sentence for sentence in said] == ([True] if refused else [])


def test_a_device_is_shown_alone_by_the_name_that_it_has_here():
    assert visible_alone("cuda:1", {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert visible_alone("cuda:1", {"CUDA_VISIBLE_DEVICES": "5, 3"})["CUDA_VISIBLE_DEVICES"] == "3"
    assert visible_alone("auto", {"CUDA_VISIBLE_DEVICES": "5"}) == {}
    with pytest.raises(ConfigError, match=r"generator.device: was 'cuda:1', and CUDA_VI.* names 1"):
        visible_alone("cuda:1", {"CUDA_VISIBLE_DEVICES": "5,-1"})


def test_copies_that_rescore_are_said_and_refused_where_the_machine_cannot_hold_them(
    config, monkeypatch
):
    algorithm = config.algorithm.model_copy(update={"rescore_share": 0.1})
    config = config.model_copy(update={"algorithm": algorithm})
    for memory, severity in ((2**50, Severity.OK), (2**20, Severity.PROBLEM)):
        here = Machine(memory=memory)
        monkeypatch.setattr(settings, "read_machine", lambda here=here: here)
        found = of_memory(config, one_host(2, 80), monkeypatch)
        (said,) = [f for f in found if "copies for rescore_share take " in f.sentence]
        assert said.severity is severity
        assert ("buffer.max_staleness" in said.sentence) == (severity is Severity.PROBLEM)
