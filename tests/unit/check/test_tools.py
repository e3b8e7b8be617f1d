"""`streamrl check` of the tools: made, used, and kept apart where they must be."""

import string
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.make_model import make_tokenizer
from actors.rendering.renderer import ChatRenderer
from streamrl.cli.check.data import _renderer, check_data, check_tools
from streamrl.config import RunConfig
from streamrl.findings import DATA, Severity
from tests.unit.rendering.test_parsing import template


def found(tmp_path: Path, model: str = "model", **generator: Any) -> list[tuple[Severity, str]]:
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "folder": tmp_path, "evaluate": False},
            "model": {"path": model},
            "data": {"source": "copy", "max_prompt_length": 100},
            "generator": generator,
        }
    )
    return [
        (finding.severity, finding.sentence)
        for finding in DATA.up_to_refusal(check_tools(config, partial(_renderer, config)))
    ]


@pytest.mark.parametrize(
    ("generator", "sentence"),
    [
        ({"environment": "tools"}, "generator.tools: environment tools has none"),
        ({"tools": ["calculator"]}, "generator.tools: nothing reads them"),
        ({"mcp_servers": [{"command": ["x"]}]}, "generator.mcp_servers: nothing reads them"),
        (
            {"environment": "tools", "tools": ["calculate"]},
            "generator.tools.0.tool: was 'calculate'",
        ),
    ],
)
def test_what_cannot_act_is_a_problem(
    tmp_path: Path, generator: dict[str, Any], sentence: str
) -> None:
    severity, said = found(tmp_path, **generator)[0]
    assert severity is Severity.PROBLEM
    assert said.startswith(sentence)


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("hermes", None),
        (
            "unknown",
            "data.tool_parser: was auto, and none reads a call as the chat template writes",
        ),
    ],
)
def test_a_chat_template_whose_calls_nobody_reads(
    tmp_path: Path, family: str, sentence: str | None
) -> None:
    tokenizer = make_tokenizer(string.printable)
    tokenizer.chat_template = template(family)
    tokenizer.save_pretrained(tmp_path / "model")
    said = found(
        tmp_path,
        model=str(tmp_path / "model"),
        environment="tools",
        tools=["calculator"],
        max_model_len=4000,
    )
    assert [severity for severity, _ in said] == [Severity.PROBLEM] * (sentence is not None)
    assert all(text.startswith(str(sentence)) for _, text in said)


@pytest.mark.parametrize(
    ("max_model_len", "severity"),
    [(None, Severity.PROBLEM), (1100, Severity.WARNING), (4000, None)],
)
def test_schemas_that_leave_no_room_for_an_answer_are_found(
    tmp_path: Path, max_model_len: int | None, severity: Severity | None
) -> None:
    """The template writes them into the prompt, beside what data.max_prompt_length bounds."""
    tokenizer = make_tokenizer(string.printable)
    tokenizer.chat_template = template("hermes")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "own.py").write_text(
        f'def look(a: int):\n    """{"x" * 700}\n\n    Args:\n        a: what\n    """\n'
    )
    told = found(
        tmp_path,
        model=str(tmp_path / "model"),
        environment="tools",
        tools=[f"{tmp_path}/own.py:look"],
        max_new_tokens=500,
        max_model_len=max_model_len,
    )
    assert [one for one, _ in told] == ([] if severity is None else [severity])
    assert all("generator.tools: their schemas take 8" in sentence for _, sentence in told)


def test_one_renderer_serves_the_prompts_and_the_tools_of_all_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(string.printable)
    tokenizer.chat_template = template("hermes")
    tokenizer.save_pretrained(tmp_path / "model")
    entry = {"environment": "tools", "weight": 1.0}
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "folder": tmp_path, "evaluate": False},
            "model": {"path": str(tmp_path / "model")},
            "data": {"source": "copy", "max_prompt_length": 100},
            "generator": {"tools": ["calculator"], "max_model_len": 4000},
            "environments": [{**entry, "name": "a"}, {**entry, "name": "b"}],
        }
    )
    loaded, load = [], ChatRenderer.from_config
    monkeypatch.setattr(
        ChatRenderer, "from_config", lambda config: loaded.append(1) or load(config)
    )
    assert list(check_data(config))
    assert len(loaded) == 1
