"""The prompt stream is a pure function of the prompt; bad files are refused by name."""

import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from actors.make_model import make_tokenizer
from actors.prompts import open_held_out, open_prompts
from actors.prompts.tasks import TASKS
from actors.rendering.renderer import ChatRenderer, PromptTooLongError
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RolloutError
from streamrl.interfaces import Prompt

ROWS = [{"prompt": f"q{i}", "answer": str(i), "level": i} for i in range(7)]


def write(tmp_path: Path, suffix: str) -> str:
    path = tmp_path / f"rows{suffix}"
    match suffix:
        case ".jsonl":
            path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
        case ".json":
            path.write_text(json.dumps(ROWS))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_every_epoch_shows_every_row_once_in_a_new_order(tmp_path, suffix):
    prompts = open_prompts(DataSettings(source=write(tmp_path, suffix)), seed=1)
    epochs = [[prompts[7 * epoch + i].content for i in range(7)] for epoch in range(3)]
    assert all(sorted(map(str, epoch)) == [row["prompt"] for row in ROWS] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = open_prompts(DataSettings(source=write(tmp_path, suffix)), seed=1)
    assert [again[20 - i].content for i in range(21)] == [c for e in epochs for c in e][::-1]


def test_a_file_keeps_its_order_if_asked_to(tmp_path):
    data = DataSettings(source=write(tmp_path, ".jsonl"), shuffle=False)
    prompts = open_prompts(data, seed=1)
    assert [prompts[i].answer for i in range(9)] == ["0", "1", "2", "3", "4", "5", "6", "0", "1"]
    assert prompts[3].row["level"] == 3
    assert prompts[9].origin == "line 3 of rows.jsonl"


def test_a_task_is_one_where_a_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "addition").mkdir()
    assert open_prompts(DataSettings(source="addition"), seed=1)[0].answer.isdecimal()
    with pytest.raises(ConfigError, match=r"data\.source: cannot read \./addition"):
        open_prompts(DataSettings(source="./addition"), seed=1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": "nowhere.jsonl"}, "data.source: cannot read nowhere.jsonl: No such file"),
        ({"source": "additoin"}, "did you mean 'addition'"),
        ({"source": "reasoning_gym:chian_sum"}, "did you mean 'chain_sum'"),
        ({"source": "addition", "source_kwargs": {"digits": 2}}, "did you mean 'num_digits'"),
        (
            {"source": "addition", "source_kwargs": {"num_digits": 1}, "num_eval_prompts": 3000},
            "hardly any to train on",
        ),
    ],
)
def test_a_source_that_cannot_be_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        open_prompts(DataSettings(**settings), seed=0)[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no rows"),
        ('{"prompt": 1', r"line 1 of rows\.jsonl is not JSON"),
        ("[1]", r"line 1 of rows\.jsonl was \[1\]; it must be a JSON object"),
        ('{"promt": "a", "answer": "b"}', "has no column 'prompt'; did you mean 'promt'"),
        ('{"prompt": "a"}', "has no column 'answer'"),
        (
            '{"prompt": "a", "answer": "b"}\n{"prompt": "c\\ud801", "answer": "d"}',
            r"data\.source: line 2 of .*: the prompt has '.ud801', half a surrogate pair",
        ),
        (
            '{"prompt": [{"role": "user", "content": "c\\udc01"}], "answer": "b"}',
            "half a surrogate pair",
        ),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path, text, sentence):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        open_prompts(DataSettings(source=str(tmp_path / "rows.jsonl")), seed=0)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"prompt_key": "question", "answer_key": "solution"},
            "data.answer_key: .*; allowed: reply; or set null, if no reward needs an answer$",
        ),
        ({"answer_key": "reply"}, "data.prompt_key: .*; allowed: question$"),
    ],
)
def test_a_missing_column_is_none_that_another_key_names(tmp_path, keys, sentence):
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "reply": "b"}')
    with pytest.raises(ConfigError, match=sentence):
        open_prompts(DataSettings(source=str(tmp_path / "rows.jsonl"), **keys), seed=0)


GOOD = {"prompt": "q", "answer": "a"}
TEXT = (
    "it must be text, or a list of messages that have a role and a content; else set "
    "data.prompt_template"
)
BAD_ROWS = [
    ({"answer": "a"}, "lacks 'prompt'; it has answer"),
    ({"prompt": "q"}, "lacks 'answer'; it has prompt"),
    ({**GOOD, "prompt": 3}, f"prompt was 3; {TEXT}"),
    ({**GOOD, "prompt": ""}, f"prompt was ''; {TEXT}"),
    ({**GOOD, "prompt": " \n"}, f"prompt was ' \\n'; {TEXT}"),
    ({**GOOD, "prompt": None}, f"prompt was None; {TEXT}"),
    ({**GOOD, "prompt": []}, f"prompt was []; {TEXT}"),
    ({**GOOD, "prompt": [{"role": "user"}]}, f"prompt was [{{'role': 'user'}}]; {TEXT}"),
    ({**GOOD, "prompt": [{"role": "user", "content": ["x"]}]}, TEXT),
    ({**GOOD, "answer": None}, "answer was None; it must have a value"),
    ({**GOOD, "prompt": [{"from": "human", "value": "q"}]}, TEXT),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(("row", "sentence"), BAD_ROWS)
def test_a_bad_row_is_named_when_the_file_is_opened(tmp_path, suffix, row, sentence):
    path, rows = tmp_path / f"rows{suffix}", [GOOD, GOOD, row, GOOD]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    path.write_text(lines if suffix == ".jsonl" else json.dumps(rows))
    place = f"line 5 of {path.name}" if suffix == ".jsonl" else f"row 3 of {path.name}"
    for setting in ("source", "eval_source"):
        data = DataSettings(**{"source": "addition", setting: str(path)})
        with pytest.raises(ConfigError) as caught:
            open_prompts(data, seed=0) if setting == "source" else open_held_out(data)
        assert str(caught.value).startswith(f"data.{setting}: {place}")
        assert str(caught.value).endswith(sentence)


@pytest.mark.parametrize("written", [json.dumps, repr])
def test_messages_and_records_may_be_text(tmp_path, written):
    """As ROLL's `messages`, `verification_info` of SYNTHETIC-1, and CSV files of pandas."""
    messages = [{"role": "user", "content": "q"}]
    texts = [written(messages), '["q"]', "[1, 2] is a list"]
    info = written({"ground_truth": 5})
    rows = [{"prompt": text, "info": info} for text in texts]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data = DataSettings(source=str(path), answer_key="info.ground_truth", shuffle=False)
    prompts = open_prompts(data, seed=0)
    assert [prompts[i].content for i in range(3)] == [tuple(messages), *texts[1:]]
    assert prompts[0].answer == "5"


@pytest.mark.parametrize("row", [{"prompt": "q", "answer": None}, {"prompt": None, "answer": "a"}])
def test_a_null_of_a_parquet_file_is_named(tmp_path, row):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD, row]), path)
    with pytest.raises(ConfigError, match=r"data\.source: row 2 of rows\.parquet: .* was None"):
        open_prompts(DataSettings(source=str(path)), seed=0)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("rows.json", b'{"prompt": "q"}', "was {'prompt': 'q'}; it must be a list of objects"),
        ("rows.json", b'["q"]', "row 1 of rows.json was 'q'; it must be a JSON object"),
        ("rows.jsonl", b'{"prompt": "\xff"}', "rows.jsonl is not UTF-8"),
        ("rows.parquet", b"PAR1", "rows.parquet is not parquet"),
        ("rows.txt", b"prompt,answer", ".jsonl.zst), datasets:NAME, reasoning_gym:NAME"),
        ("rows.csv", b"prompt,answer", "rows.csv holds no rows"),
        ("rows.csv", b"prompt,answer\nq", "line 2 of rows.csv has 1 values; there are 2 columns"),
        ("rows.jsonl.gz", b"nothing", "rows.jsonl.gz cannot be decompressed"),
        ("rows.jsonl.zst", b"nothing", "rows.jsonl.zst cannot be decompressed"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        open_prompts(DataSettings(source=str(tmp_path / name)), seed=0)
    assert sentence in str(caught.value)


def test_a_file_that_is_written_over_while_it_is_read_is_refused_and_one_that_is_replaced_is_not(
    tmp_path,
):
    path, new = tmp_path / "rows.jsonl", tmp_path / "new"
    path.write_text(f"{json.dumps(GOOD)}\n" * 2)
    prompts = open_prompts(DataSettings(source=str(path)), seed=0)
    new.write_text('{"prompt": "other", "answer": "a"}\n')
    new.rename(path)
    assert prompts[0].content == "q"
    prompts = open_prompts(DataSettings(source=str(path)), seed=0)
    with path.open("a") as file:
        file.write('{"prompt": "added"}\n')
    assert prompts[0].content == "other"
    times = path.stat()
    path.write_text('{"prompt": "third", "answer": "a"}\n')
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"data\.source: .*rows\.jsonl was written over while"):
        prompts[0]


def test_a_row_is_compared_with_what_was_there_and_not_the_whole_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n" * 3)
    prompts = open_prompts(DataSettings(source=str(path), shuffle=False), seed=0)
    with path.open("r+") as file:
        file.seek(len(json.dumps(GOOD)) + 1)
        file.write(json.dumps(GOOD).replace("q", "r"))
    assert prompts[0].content == prompts[2].content == "q"
    with pytest.raises(ConfigError, match=r"rows\.jsonl was written over while"):
        prompts[1]


def test_rows_that_are_known_to_be_prompts_are_read_one_by_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{json.dumps(GOOD)}\n{{"prompt": 3, "answer": "a"}}\n')
    data = DataSettings(source=str(path), shuffle=False)
    prompts = open_prompts(data, seed=0, are_checked=True)
    assert prompts[0].content == "q"
    with pytest.raises(ConfigError, match=r"line 2 of rows\.jsonl: prompt was 3"):
        prompts[1]


def test_a_line_ends_with_a_newline_only(tmp_path):
    row = {"prompt": "a\u2028b\x85c", "answer": "x"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n")
    prompts = open_prompts(DataSettings(source=str(tmp_path / "rows.jsonl")), seed=0)
    assert prompts[0].content == "a\u2028b\x85c"


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_a_function_of_seed_and_prompt_index_and_holds_out_its_own(task):
    data = DataSettings(source=task, num_eval_prompts=50)
    first, second = open_prompts(data, seed=3), open_prompts(data, seed=3)
    assert [first[i] for i in range(20)] == [second[i] for i in range(20)]
    assert first[0] != open_prompts(data, seed=4)[0]
    held_out = {repr(open_held_out(data)[i].content) for i in range(50)}
    assert not held_out & {repr(first[i].content) for i in range(2000)}


def test_tasks_know_their_answers():
    prompts = open_prompts(DataSettings(source="addition"), seed=0)
    for prompt in (prompts[i] for i in range(50)):
        a, b = str(prompt.content).rstrip("=").split("+")
        assert prompt.answer == f"{int(a) + int(b):03}"
    prompts = open_prompts(DataSettings(source="sort", source_kwargs={"tail": 1.0}), seed=0)
    lengths = [len(prompts[i].answer) for i in range(200)]
    assert min(lengths) == 3
    assert max(lengths) == 8
    assert all(prompts[i].answer == "".join(sorted(prompts[i].answer)) for i in range(50))


def test_a_file_needs_held_out_prompts_of_its_own(tmp_path):
    source = write(tmp_path, ".jsonl")
    with pytest.raises(ConfigError, match=r"data\.eval_source: is needed"):
        open_held_out(DataSettings(source=source))
    assert open_held_out(DataSettings(source=source, eval_source=source))[0]


async def test_reasoning_gym_prompts_score_their_own_answers():
    from actors.rewards import make_reward
    from streamrl.interfaces import Episode
    from streamrl.types import FinishReason

    data = DataSettings(source="reasoning_gym:chain_sum", reward="task")
    prompts = open_prompts(data, seed=0)
    assert prompts[5000].content == open_prompts(data, seed=0)[5000].content
    assert prompts[0].content != open_held_out(data)[0].content
    episodes = [
        Episode(prompts[i], answer, 1, FinishReason.STOP)
        for i in range(5)
        for answer in (prompts[i].answer, "wrong")
    ]
    rewards = [score.reward for score in await make_reward(data).score(episodes)]
    assert rewards[::2] == [1.0] * 5
    assert max(rewards[1::2]) < 0.1


async def test_a_scorer_that_cannot_read_a_response_gives_it_nothing():
    from actors.rewards import make_reward
    from streamrl.interfaces import Episode
    from streamrl.types import FinishReason

    data = DataSettings(source="reasoning_gym:prime_factorization", reward="task")
    prompt = open_prompts(data, seed=0)[0]
    episodes = [
        Episode(prompt, answer, 1, FinishReason.STOP) for answer in ("no idea", prompt.answer)
    ]
    scores = await make_reward(data).score(episodes)
    assert [score.reward for score in scores] == [0.0, 1.0]
    assert [score.metrics["reward/task/raised"] for score in scores] == [1.0, 0.0]


CHAT = "{% for m in messages %}<s>{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}a:"


def make_renderer(**settings: object) -> ChatRenderer:
    tokenizer = make_tokenizer("abcdefghijklmnopqrstuvwxyz:?")
    data = DataSettings.model_validate({"source": "addition", **settings})
    return ChatRenderer(tokenizer, data)


def test_a_prompt_that_cannot_be_rendered_is_named(tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('no system role') }}")
    row, messages = "line 7 of rows.jsonl", ({"role": "user", "content": "abc"},)
    with pytest.raises(ConfigError, match=f"chat_template: it cannot render {row}: no system role"):
        make_renderer(chat_template=template).encode(Prompt("abc", "", {}, row))
    with pytest.raises(ConfigError, match=f"max_prompt_length 2: {row} has 3 tokens"):
        make_renderer(max_prompt_length=2).encode(Prompt("abc", "", {}, row))
    with pytest.raises(ConfigError, match=f"chat_template: {row} is a list of messages"):
        make_renderer().encode(Prompt(messages, "", {}, row))


def test_a_text_that_is_no_unicode_fails_its_prompt(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    for renderer in (make_renderer(), make_renderer(chat_template=template)):
        with pytest.raises(RolloutError, match="half a surrogate pair"):
            renderer.encode(Prompt("ab\ud83d", ""))


def test_a_prompt_is_rendered_as_it_stands_or_through_a_template(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    plain = make_renderer(chat_template="none")
    assert plain.decode(plain.encode(Prompt("abc", ""))) == "abc"
    chat = make_renderer(chat_template=template, system_prompt="be")
    assert chat.decode(chat.encode(Prompt("hi", ""))) == "s:beu:hia:"
    user, reply = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    assert chat.decode(chat.encode(Prompt((user, reply, user), ""))) == "u:xa:yu:xa:"


def test_a_template_that_leaves_out_the_system_prompt_is_refused(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    make_renderer(chat_template=template)
    with pytest.raises(ConfigError, match=r"chat_template: it leaves out messages of the role sys"):
        make_renderer(chat_template=template, system_prompt="be")
    with pytest.raises(ConfigError, match=r"so the policy would not read the tools"):
        make_renderer(chat_template=template, tool_schemas="system_message").require_tools()


def test_the_policy_goes_on_with_a_turn_that_a_prompt_has_begun(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    chat = make_renderer(chat_template=template)
    turns = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
    assert chat.decode(chat.encode(Prompt(turns, ""))) == "u:xa:y"


def test_messages_without_a_template_are_refused():
    with pytest.raises(ConfigError, match="name a Jinja file"):
        make_renderer().encode(Prompt(({"role": "user", "content": "x"},), ""))


def test_a_prompt_that_is_too_long_is_cut_dropped_or_refused():
    prompt = Prompt("abcdef", "")

    def encoded(truncation: str) -> str:
        renderer = make_renderer(max_prompt_length=4, truncation=truncation)
        return renderer.decode(renderer.encode(prompt))

    assert encoded("left") == "cdef"
    assert encoded("right") == "abcd"
    with pytest.raises(PromptTooLongError, match="6 tokens"):
        encoded("drop")
    with pytest.raises(ConfigError, match=r"max_prompt_length 4: a prompt has 6 tokens \('abcdef'"):
        encoded("error")
