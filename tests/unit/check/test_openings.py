"""What `streamrl check` says of a chat template whose prompts do not open the answer."""

from pathlib import Path

import pytest

from streamrl.cli.check.data import check_data
from streamrl.config import RunConfig
from streamrl.findings import Severity

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


def warnings(template: Path) -> list[str]:
    data = {"source": "copy", "chat_template": template}
    found = check_data(RunConfig.model_validate({"model": {"path": "unused"}, "data": data}))
    return [f.sentence for f in found if f.severity is Severity.WARNING]


def test_a_template_that_leaves_the_opening_of_an_answer_to_the_policy_is_warned_of(tmp_path):
    (tmp_path / "chat.jinja").write_text(TURNS)
    (sentence,) = warnings(tmp_path / "chat.jinja")
    assert sentence.startswith("data.chat_template: it writes '<assistant>' in front of an answer")


@pytest.mark.parametrize(
    "text",
    [
        TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}",
        INSTRUCTIONS,
        "{% for m in messages %}{{ raise_exception('no roles') }}{% endfor %}",
    ],
)
def test_a_template_that_opens_the_answer_or_needs_no_opening_is_not_warned_of(tmp_path, text):
    (tmp_path / "chat.jinja").write_text(text)
    assert warnings(tmp_path / "chat.jinja") == []


def test_prompts_are_checked_beside_a_damaged_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}')
    data = {"source": str(tmp_path / "rows.jsonl")}
    run = RunConfig.model_validate({"model": {"path": str(tmp_path)}, "data": data})
    assert any("more than the 1 prompts" in finding.sentence for finding in check_data(run))
