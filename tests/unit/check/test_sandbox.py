"""`streamrl check` of the sandbox: what programs of the reward `code` and the tool `python` get."""

from pathlib import Path
from typing import Any

import pytest

from actors.sandbox import sandbox as sandboxes
from streamrl.cli.check import data
from streamrl.cli.check.data import check_sandbox
from streamrl.cli.check.machine import check_isolation
from streamrl.config import RunConfig
from streamrl.findings import Severity

NOTHING = {"namespaces": "not permitted", "landlock": "too old"}


def found(
    tmp_path: Path, *, isolation: str | None = None, user: str = "tool"
) -> list[tuple[Severity, str]]:
    kwargs: dict[str, Any] = {} if isolation is None else {"isolation": isolation}
    rows: dict[str, Any] = {"source": "copy"}
    generator: dict[str, Any] = {}
    environments: list[dict[str, Any]] = []
    match user:
        case "tool":
            generator = {"environment": "tools", "tools": [{"tool": "python", "kwargs": kwargs}]}
        case "reward":
            rows |= {"reward": "code", "reward_kwargs": kwargs}
        case "rewards":
            rows |= {"rewards": ["length", {"reward": "code", "kwargs": kwargs}]}
        case "entry":
            own = {"reward": "code", "reward_kwargs": kwargs}
            environments = [{"name": "a", "environment": "single_turn", **own}]
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "folder": tmp_path, "evaluate": False},
            "model": {"path": "model"},
            "data": rows,
            "generator": generator,
            "environments": environments,
        }
    )
    return [(finding.severity, finding.sentence) for finding in check_sandbox(config)]


def lacks(monkeypatch: pytest.MonkeyPatch, reasons: dict[str, str]) -> None:
    for module in (sandboxes, data):
        monkeypatch.setattr(module, "why_not", lambda kind: reasons.get(kind, ""))


@pytest.mark.parametrize(
    ("reasons", "isolation", "severity", "said"),
    [
        ({}, None, Severity.OK, "programs have namespaces of their own"),
        ({"namespaces": "not permitted"}, None, Severity.WARNING, "(no namespaces: not permitted)"),
        ({}, "landlock", Severity.OK, "programs are held by Landlock"),
        (
            {"namespaces": "not permitted"},
            "namespaces",
            Severity.PROBLEM,
            "namespaces: not permitted",
        ),
        (NOTHING, "auto", Severity.PROBLEM, "(namespaces: not permitted; landlock: too old)"),
        (NOTHING, "none", Severity.WARNING, "with the files, processes and network of this user"),
    ],
)
def test_what_programs_get_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reasons: dict[str, str],
    isolation: str | None,
    severity: Severity,
    said: str,
) -> None:
    lacks(monkeypatch, reasons)
    ((found_severity, sentence),) = found(tmp_path, isolation=isolation)
    assert found_severity is severity
    assert sentence.startswith("generator.tools: python: ")
    assert said in sentence


@pytest.mark.parametrize(
    ("user", "place"),
    [
        ("reward", "data.reward: code: "),
        ("rewards", "data.rewards: code: "),
        ("entry", "environments.0.reward: code: "),
    ],
)
def test_the_reward_code_needs_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, place: str
) -> None:
    lacks(monkeypatch, NOTHING)
    ((severity, sentence),) = found(tmp_path, user=user)
    assert severity is Severity.PROBLEM
    assert sentence.startswith(f"{place}this machine cannot keep code that a model wrote apart")
    ((severity, _),) = found(tmp_path, user=user, isolation="none")
    assert severity is Severity.WARNING


def test_a_run_without_programs_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks(monkeypatch, NOTHING)
    assert found(tmp_path, user="nobody") == []


@pytest.mark.parametrize(
    ("reasons", "severity"),
    [
        ({"namespaces": "", "landlock": "too old"}, Severity.OK),
        ({"namespaces": "not permitted", "landlock": ""}, Severity.OK),
        (NOTHING, Severity.WARNING),
    ],
)
def test_it_says_what_a_machine_has(reasons: Any, severity: Severity) -> None:
    (finding,) = check_isolation(reasons)
    assert finding.severity is severity
    assert (
        all(reason in finding.sentence for reason in reasons.values()) or not reasons["namespaces"]
    )
