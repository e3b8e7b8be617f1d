"""`streamrl buffer inspect` and `drain` against a buffer that other processes reach."""

import asyncio
import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from buffers.connect import connect
from streamrl.cli.main import main
from streamrl.config import to_yaml
from streamrl.types import LearnerActivity, LearnerStatus
from tests.contract.limits_config import GROUPS_PER_STEP, limits_config
from tests.contract.test_buffer_limits import SHARED, serving
from tests.records import fill, lease_one, make_status


async def hold_groups(url: str, *, train: bool) -> None:
    """A batch but one buffered and one leased; or the batch put and trained."""
    buffer = connect(limits_config(url))
    await buffer.attach(0, None)
    await fill(buffer, *map(str, range(GROUPS_PER_STEP - (not train))))
    if train:
        await buffer.take(GROUPS_PER_STEP, 0, 10.0)
        await buffer.advance(1)
    else:
        await lease_one(buffer, "s/1", "slow", 0.0)
        status = make_status("slow", "s", lease_ids=("s/1",), lease_ages_s=(12.5,))
        await buffer.heartbeat(status)
    await buffer.close()


def target_of(url: str, folder: Path) -> str:
    """What a person names: a server of one run by its address, a shared one by the run's file."""
    if url.startswith("zmq://"):
        return url
    path = folder / "config.yaml"
    path.write_text(to_yaml(limits_config(url)))
    return str(path)


@pytest.mark.parametrize("backend", SHARED)
def test_a_buffer_that_does_not_empty_is_printed_with_its_holders(
    backend: str, tmp_path: Path, capsys
):
    with serving(backend, tmp_path) as url:
        asyncio.run(hold_groups(url, train=False))
        target = target_of(url, tmp_path)
        assert main(["buffer", "inspect", target, "--interval", "0.05"]) == 0
        output = capsys.readouterr().out
        assert "10 groups, at most 30; learner 1 attached" in output
        assert "10 leased = 1 leased + 9 buffered" in output
        assert "the books close" in output
        assert "slow" in output
        assert "12.5 s" in output
        assert main(["buffer", "drain", target, "--deadline", "0.1"]) == 1
        output = capsys.readouterr().out
        assert "not drained within 0.1 s: 1 leased (slow 1), 9 buffered and 0 taken" in output


@pytest.mark.parametrize("backend", SHARED)
def test_an_empty_buffer_is_drained(backend: str, tmp_path: Path, capsys):
    with serving(backend, tmp_path) as url:
        asyncio.run(hold_groups(url, train=True))
        assert main(["buffer", "drain", target_of(url, tmp_path), "--deadline", "30"]) == 0
        output = capsys.readouterr().out
        assert "drained at version 1: 10 trained groups are kept until the learner's next" in output


@pytest.mark.parametrize("backend", SHARED)
def test_a_drain_ends_where_no_learner_takes_what_waits(backend: str, tmp_path: Path, capsys):
    run = tmp_path / "limits"
    run.mkdir()
    ended = LearnerStatus(
        policy_version=0,
        learner_term=1,
        activity=LearnerActivity.ENDED,
        activity_s=1.0,
        time_s=time.time(),
    )

    async def wait_for_a_batch(url: str) -> None:
        buffer = connect(limits_config(url))
        await buffer.attach(0, None)
        await fill(buffer, *map(str, range(GROUPS_PER_STEP)))
        await buffer.close()

    with serving(backend, tmp_path) as url:
        asyncio.run(wait_for_a_batch(url))
        (run / "config.yaml").write_text(to_yaml(limits_config(url)))
        (run / "learner.json").write_text(json.dumps(msgspec.to_builtins(ended, str_keys=True)))
        assert main(["buffer", "drain", str(run), "--deadline", "0.1"]) == 1
        assert "not drained within 0.1 s" in capsys.readouterr().out, "a launch has begun since"
        os.utime(run / "config.yaml", (0, 0))
        assert main(["buffer", "drain", str(run), "--deadline", "30"]) == 1
    output = capsys.readouterr().out
    assert "10 groups wait and no learner takes them: start one with `streamrl learner" in output
    assert f"--config {run}/config.yaml --resume`" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["buffer", "inspect", "redis://localhost"], "give the configuration, such as runs/NAME"),
        (["buffer", "drain", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["buffer", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["buffer"], "give one configuration file"),
    ],
)
def test_what_is_no_buffer_is_one_sentence_and_exit_code_2(capsys, arguments, sentence):
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("backend", SHARED)
def test_status_of_a_buffer_alone_prints_what_it_knows(backend: str, tmp_path: Path, capsys):
    with serving(backend, tmp_path) as url:
        asyncio.run(hold_groups(url, train=False))
        target = target_of(url, tmp_path)
        assert main(["status", target]) == 0
        output = capsys.readouterr().out
        assert "version 0" in output.splitlines()[0]
        assert output.splitlines()[1] == "healthy"
        assert "1 leased, 9 buffered, 0 taken, at most 30; the books close" in output
        assert "number 1 attached, at version 0" in output
        slow = output.splitlines()[-1].split()
        assert slow[:-2] == ["slow", "active", "0", "0", "1", "12.5", "s", "0", "0"]
        assert main(["status", target, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["healthy"], found["findings"], found["learner"]) == (True, [], None)
        assert found["buffer"]["generators"][0]["lease_ids"] == ["s/1"]
        assert found["waited_s"] >= 12.5
