"""`streamrl check` of the tools: made, used, and kept apart where they must be."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.cli.check.data import check_tools
from streamrl.config import RunConfig
from streamrl.findings import Severity


def found(tmp_path: Path, **generator: Any) -> list[tuple[Severity, str]]:
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "folder": tmp_path, "evaluate": False},
            "model": {"path": "model"},
            "data": {"source": "copy"},
            "generator": generator,
        }
    )
    return [(finding.severity, finding.sentence) for finding in check_tools(config)]


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
