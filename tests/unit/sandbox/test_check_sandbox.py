"""`streamrl check` of the sandbox: what programs of the reward `code` and the tool `python` get."""

from pathlib import Path
from typing import Any

import pytest

from actors.sandbox import isolation as isolations
from streamrl.cli.doctor.findings import Level
from streamrl.cli.doctor.sandbox import check_sandbox as check_machine
from streamrl.cli.preflight import machine
from streamrl.cli.preflight.findings import Kind
from streamrl.config import RunConfig

NOTHING = {"namespaces": "not permitted", "landlock": "too old"}


def found(
    tmp_path: Path, *, isolation: str | None = None, user: str = "tool"
) -> list[tuple[Kind, str]]:
    kwargs: dict[str, Any] = {} if isolation is None else {"isolation": isolation}
    data: dict[str, Any] = {"source": "copy"}
    generator: dict[str, Any] = {}
    environments: list[dict[str, Any]] = []
    match user:
        case "tool":
            generator = {"environment": "tools", "tools": [{"tool": "python", "kwargs": kwargs}]}
        case "reward":
            data |= {"reward": "code", "reward_kwargs": kwargs}
        case "rewards":
            data |= {"rewards": ["length", {"reward": "code", "kwargs": kwargs}]}
        case "entry":
            own = {"reward": "code", "reward_kwargs": kwargs}
            environments = [{"name": "a", "environment": "single_turn", **own}]
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "folder": tmp_path, "evaluate": False},
            "model": {"path": "model"},
            "data": data,
            "generator": generator,
            "environments": environments,
        }
    )
    return [(finding.kind, finding.sentence) for finding in machine.check_sandbox(config)]


def lacks(monkeypatch: pytest.MonkeyPatch, reasons: dict[str, str]) -> None:
    for module in (isolations, machine):
        monkeypatch.setattr(module, "why_not", lambda kind: reasons.get(kind, ""))


@pytest.mark.parametrize(
    ("reasons", "isolation", "kind", "said"),
    [
        ({}, None, Kind.FACT, "programs have namespaces of their own"),
        ({"namespaces": "not permitted"}, None, Kind.WARNING, "(no namespaces: not permitted)"),
        ({}, "landlock", Kind.FACT, "programs are held by Landlock"),
        ({"namespaces": "not permitted"}, "namespaces", Kind.PROBLEM, "namespaces: not permitted"),
        (NOTHING, "auto", Kind.PROBLEM, "(namespaces: not permitted; landlock: too old)"),
        (NOTHING, "none", Kind.WARNING, "with the files, processes and network of this user"),
    ],
)
def test_what_programs_get_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reasons: dict[str, str],
    isolation: str | None,
    kind: Kind,
    said: str,
) -> None:
    lacks(monkeypatch, reasons)
    ((found_kind, sentence),) = found(tmp_path, isolation=isolation)
    assert found_kind is kind
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
    ((kind, sentence),) = found(tmp_path, user=user)
    assert kind is Kind.PROBLEM
    assert sentence.startswith(f"{place}this machine cannot keep code that a model wrote apart")
    ((kind, _),) = found(tmp_path, user=user, isolation="none")
    assert kind is Kind.WARNING


def test_a_run_without_programs_asks_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks(monkeypatch, NOTHING)
    assert found(tmp_path, user="nobody") == []


@pytest.mark.parametrize(
    ("reasons", "level"),
    [
        ({"namespaces": "", "landlock": "too old"}, Level.OK),
        ({"namespaces": "not permitted", "landlock": ""}, Level.OK),
        (NOTHING, Level.WARN),
    ],
)
def test_the_doctor_says_what_a_machine_has(reasons: Any, level: Level) -> None:
    (finding,) = check_machine(reasons)
    assert finding.level is level
    assert (
        all(reason in finding.sentence for reason in reasons.values()) or not reasons["namespaces"]
    )
