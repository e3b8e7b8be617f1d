"""Debian's Prometheus: installed where it is missing and we may, else the tests are skipped."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.alert_cases import CASES, Case, Series

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"


def require(*packages: str, program: str) -> str:
    """The path of the program, from these packages of Debian."""
    if shutil.which(program) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages]
        subprocess.run(install, env=environment, **quiet)
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is missing: apt-get install {' '.join(packages)}")
    return path


def promtool(*arguments: object) -> str:
    """Its output.

    Raises:
        AssertionError: it failed.
    """
    command = [require("prometheus", program="promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rule_tests() -> str:
    """All of CASES as a file of `promtool test rules`."""
    tests = [
        _test(alert, case, series, fires=fires)
        for alert, case in CASES.items()
        for fires, group in ((True, case.fires), (False, case.quiet))
        for series in group
    ]
    return yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests})


def _test(alert: str, case: Case, series: Series, *, fires: bool) -> dict[str, object]:
    expected = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "interval": "1m",
        "name": f"{alert} {'fires' if fires else 'does not fire'}",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": f"{case.at_minute}m",
                "exp_samples": expected,
            }
        ],
    }
