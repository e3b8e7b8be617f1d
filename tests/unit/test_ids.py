"""An id from outside names nothing but itself: no other folder, no second line of a log."""

import socket
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from streamrl.cli.main import main
from streamrl.types.ranges import check_id, named_after_host
from tests.unit.test_cli import QUICKSTART

BAD = ["../../../escape", "", ".", "..", "a/b", "/etc", "a\n", "a b", "-x", "a" * 129, "ü", "a\x00"]


@pytest.mark.parametrize("value", BAD)
def test_what_is_no_id_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^--id: was .* it must be 1 to 128 letters"):
        check_id("--id", value)


@given(st.text(max_size=130))
def test_an_id_is_one_part_of_a_path(value):
    try:
        check_id("--id", value)
    except ValueError:
        return
    assert (Path("/folder") / f"{value}.log").resolve().parent == Path("/folder")
    assert len(value.split()) == 1


@pytest.mark.parametrize("value", ["generator-0", "pod_7.zone-b", "0", "A" * 128])
def test_ids_of_people_and_schedulers_are_accepted(value):
    assert check_id("--id", value) == value


def test_replicas_are_named_after_their_hosts():
    assert named_after_host("generator-{host}") == f"generator-{socket.gethostname()}"
    assert named_after_host("generator-0") == "generator-0"


@pytest.mark.parametrize("value", ["../../../escape", ""])
def test_a_generator_with_another_name_than_an_id_writes_nothing(tmp_path, capsys, value):
    folder = tmp_path / "a" / "b" / "runs"
    overrides = ["--set", f"run.folder={folder}", "--set", "buffer.url=zmq://127.0.0.1:1"]
    assert main(["generator", QUICKSTART, "--id", value, *overrides]) == 2
    assert f"--id: was {value!r}; it must be" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("torch_is_known")
@pytest.mark.parametrize("value", ["../up", "a/b", "a" * 129, ".hidden"])
def test_a_run_is_named_by_an_id(capsys, value):
    assert main(["check", QUICKSTART, "--set", f"run.name={value}"]) == 2
    assert "run.name: was" in capsys.readouterr().err
