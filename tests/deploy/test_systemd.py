"""The units of deploy/systemd: systemd's own parser takes them, and they follow the exit codes."""

import re
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from streamrl.cli.arguments.commands import parse
from streamrl.config.run import RunSettings
from streamrl.errors import EXIT_CONFIG, EXIT_DIVERGED, EXIT_FENCED
from tests.documents import ROOT
from tests.system.conftest import STREAMRL

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
# Of 10; what remains of a learner's and a generator's are devices and the memory of compilers.
MOST_EXPOSED = {"streamrl-buffer": 2.0, "streamrl-learner": 5.0, "streamrl-generator@": 5.0}


def read(unit: Path) -> RawConfigParser:
    """Each key; the last value of one that is repeated."""
    parser = RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return parser


@pytest.fixture
def installed(tmp_path: Path) -> list[str]:
    """The units as they would be installed, with the `streamrl` that is there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt-get install systemd)")
    for unit in UNITS:
        text = unit.read_text().replace("/opt/streamrl/bin/streamrl", STREAMRL)
        (tmp_path / unit.name.replace("@", "@0")).write_text(text)
    return sorted(str(path) for path in tmp_path.iterdir())


def test_systemd_finds_nothing_wrong(installed: list[str]):
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *installed], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_finds_a_misspelled_option(installed: list[str]):
    """The check above can fail."""
    first = Path(installed[0])
    first.write_text(first.read_text().replace("TimeoutStopSec", "TimeoutStopSecs"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(first)], capture_output=True, text=True
    )
    assert "'TimeoutStopSecs'" in done.stderr


def test_the_units_are_confined(installed: list[str]):
    for file in installed:
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", file], capture_output=True, text=True
        )
        found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
        if found is None:
            pytest.skip(f"this systemd-analyze judges no file: {done.stderr.strip()}")
        name = Path(file).stem.replace("@0", "@")
        assert float(found.group(1)) <= MOST_EXPOSED[name], (name, done.stdout)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_failure_that_a_restart_cannot_change_is_not_restarted(unit: Path):
    service, section = read(unit)["Service"], read(unit)["Unit"]
    never = {EXIT_CONFIG, EXIT_FENCED, EXIT_DIVERGED}
    assert service["Restart"] == "on-failure"
    assert set(map(int, service["RestartPreventExitStatus"].split())) == never
    assert int(section["StartLimitBurst"]) == RunSettings().max_restarts
    assert float(section["StartLimitIntervalSec"]) == RunSettings().restart_window_s


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_is_one_of_streamrl(unit: Path):
    words = read(unit)["Service"]["ExecStart"].split()
    arguments = parse(words[1:])
    assert arguments.command == unit.stem.removeprefix("streamrl-").removesuffix("@")
    assert arguments.config == "/etc/streamrl/run.yaml"
    # It is the same command after a crash.
    assert getattr(arguments, "resume", True) is True
