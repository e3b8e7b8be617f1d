"""Samples: the text of the tokens that were trained, kept within bounds, safe to read."""

import io
import json
import shutil
import threading

import msgspec
import numpy as np
import pytest
from msgspec import structs
from rich.console import Console

from learners.samples import MOST_WAITING, SampleWriter, StepSamples
from streamrl.cli.arguments.commands import parse
from streamrl.cli.display.view import newest_sample
from streamrl.cli.main import main
from streamrl.cli.report import page_data, write_page
from streamrl.cli.samples import chosen, rendered
from streamrl.config import to_yaml
from streamrl.samples.files import (
    SampleFile,
    newest_first,
    read_samples,
    side_by_side,
    validation_file,
    validation_files,
    validations_after,
    write_validation,
)
from streamrl.samples.record import (
    MAX_TOKENS,
    Decoder,
    Message,
    Sample,
    piece_lengths,
    printable,
    sample_of,
    without_markup,
)
from streamrl.tracking.dashboards import HELD_OUT, TRAINED, columns_of, markdown_table, rows
from streamrl.types import FinishReason, Trajectory
from tests.full_disk import files_no_larger_than
from tests.records import make_sample
from tests.training import make_config, make_groups

NASTY = "\x1b]0;title\x07\x1b[2J \u202e <script>alert(1)</script> [bold]| a\r\n`b` \x9b31m"


def letters(token_ids) -> str:
    return "".join(chr(96 + token) for token in token_ids)


def make_trajectory(*spans: tuple[bool, str]) -> Trajectory:
    mask = np.concatenate([np.full(len(text), sampled) for sampled, text in spans])
    ids = [ord(letter) - 96 for _, text in spans for letter in text]
    return Trajectory(
        token_ids=np.array(ids, np.int32),
        response_mask=mask,
        behavior_logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.where(mask, 5 + np.arange(len(mask)), -1).astype(np.int32),
        reward=0.5,
        finish_reason=FinishReason.STOP,
    )


def make_marked(**facts: object) -> Sample:
    """As a chat template and a reward leave it."""
    return make_sample(
        prompt="<|im_start|>user\nWhat is 4 + 5?<|im_end|>\n<|im_start|>assistant\n",
        text="so 7<|im_end|>",
        answer="9",
        extracted="7",
        special_tokens=("<|im_end|>", "<|im_start|>"),
        **facts,
    )


def make_run(tmp_path):
    config = make_config(run={"folder": tmp_path, "name": "run"})
    config.run.path.mkdir()
    (config.run.path / "config.yaml").write_text(to_yaml(config))
    return config


def test_a_sample_says_who_wrote_what_in_the_order_of_the_tokens():
    trajectory = make_trajectory((False, "ask"), (True, "call"), (False, "result"), (True, "end"))
    sample = sample_of(
        trajectory, Decoder(letters), step=9, prompt_index=1, sibling=2, environment="calculator"
    )
    assert sample.prompt == "ask"
    assert [(m.role, m.content) for m in sample.messages] == [
        ("assistant", "call"),
        ("environment", "result"),
        ("assistant", "end"),
    ]
    assert (sample.version, sample.newest_version, sample.num_response_tokens) == (8, 20, 7)
    assert sample.response == "call\nend"


def marked_words(token_ids) -> str:
    """Each number is a word; from 90 on they are a chat template's."""
    marks = {90: "<|im_start|>", 91: "<|im_end|>", 92: "<|never|>"}
    return " ".join(marks.get(token, f"word{token}") for token in token_ids)


def test_a_sample_has_the_extracted_answer_each_reward_and_the_special_tokens_that_occur():
    trajectory = make_trajectory((False, "ask"), (True, "end"))
    trajectory = structs.replace(
        trajectory,
        token_ids=np.array([90, 1, 91, 2, 3, 91], np.int32),
        metrics={"reward/math": 0.0, "reward/judge": 1.0, "reward/judge/length": 3.0, "x": 1.0},
        extracted="7",
    )
    decoder = Decoder(marked_words, ("<|im_end|>", "<|im_start|>", "<|never|>"))
    facts = {"step": 1, "prompt_index": 1, "sibling": 0, "environment": "e", "answer": "9"}
    sample = sample_of(trajectory, decoder, **facts)
    assert (sample.answer, sample.extracted) == ("9", "7")
    assert sample.rewards == {"math": 0.0, "judge": 1.0}
    assert sample.special_tokens == ("<|im_end|>", "<|im_start|>")
    assert "<|im_start|>" in sample.prompt
    plain = sample.without_markup()
    assert (plain.prompt, plain.response) == ("word1", "word2 word3")
    line = json.dumps(msgspec.to_builtins(structs.replace(sample, extracted="")))
    assert msgspec.json.decode(line, type=Sample).extracted == ""


@pytest.mark.parametrize(
    ("text", "special", "plain"),
    [
        ("<s>[INST] Why?[/INST]", ["<s>", "[INST]", "[/INST]"], "Why?"),
        (
            "<|bot|><|header|>system<|/header|>\n\nBe brief.<|eot|>"
            "<|header|>user<|/header|>\n\nWhy?<|eot|><|header|>assistant<|/header|>\n\n",
            ["<|bot|>", "<|header|>", "<|/header|>", "<|eot|>"],
            "Be brief.\nWhy?",
        ),
        ("<bos><turn>user\nWhy?<end>\n<turn>model\n", ["<bos>", "<turn>", "<end>"], "Why?"),
        ("<|user|>user names<|end|>", ["<|user|>", "<|end|>"], "user names"),
        ("<think>9</think> 9", ["<|end|>"], "<think>9</think> 9"),
        ("  as it stands\n", [], "  as it stands\n"),
    ],
)
def test_people_read_texts_without_the_markup_of_the_template(text, special, plain):
    assert without_markup(text, special) == plain


def shown(panels) -> str:
    output = io.StringIO()
    Console(file=output, width=100).print(*panels)
    return output.getvalue()


def test_a_sample_shows_what_was_expected_and_read_and_markup_only_if_asked():
    sample = make_marked(rewards={"math": 0.0, "format": 1.0})
    said = shown([rendered(sample)])
    assert "expected 9, extracted 7, math 0, format 1" in said
    assert "What is 4 + 5?" in said
    assert "im_start" not in said
    assert "<|im_start|>user" in shown([rendered(sample, markup=True)])
    assert "extracted nothing" in shown([rendered(structs.replace(sample, extracted=""))])
    assert "extracted" not in shown([rendered(make_sample())])


def write_versions(run, versions=(0, 10, 20), keep=20) -> None:
    """Two prompts, two responses each; the second prompt comes with version 10."""
    for version in versions:
        facts = {"version": version, "answer": "9", "extracted": str(version)}
        samples = [
            make_sample(version, i / 2, f"{i} of {version}", prompt_index=index, sibling=i, **facts)
            for index in (3, 4)[: 1 + bool(version)]
            for i in (0, 1)
        ]
        write_validation(run, version, samples, keep)


def test_the_versions_of_a_held_out_prompt_stand_side_by_side(tmp_path, capsys):
    config = make_run(tmp_path)
    run = str(config.run.path)
    assert side_by_side(config.run.path) == []
    write_versions(config.run.path)
    assert main(["samples", run, "--validation", "all"]) == 0
    said = capsys.readouterr().out
    places = [
        said.index(words) for words in ("prompt 3, expected 9", "0 of 0", "0 of 10", "0 of 20")
    ]
    assert places == sorted(places)
    assert said.index("prompt 4") > places[-1]
    assert "1 of" not in said
    assert main(["samples", run, "--validation", "all", "--grep", "of 20", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt_index"], line["step"]) for line in lines] == [(3, 20), (4, 20)]
    assert main(["samples", run, "--validation", "all", "--best"]) == 2
    assert "--best: has no effect on --validation all" in capsys.readouterr().err
    write_page(config)
    (section,) = page_data(config, [])["samples"]
    (first, _) = section["samples"]
    assert (first["title"], first["verdict"]) == ("prompt 3", "expected 9")
    assert [v["verdict"] for v in first["versions"]] == [f"extracted {v}" for v in (0, 10, 20)]
    assert [v["title"] for v in first["versions"]] == [
        f"version {v}, reward 0" for v in (0, 10, 20)
    ]


def test_the_first_validation_stays_and_the_newest_are_compared_with_it(tmp_path):
    write_versions(tmp_path, range(0, 80, 10), keep=4)
    assert [int(path.stem) for path in validation_files(tmp_path)] == [0, 40, 50, 60, 70]
    shutil.copy(validation_file(tmp_path, 70), tmp_path / "validation" / "00000070 (copy).jsonl")
    assert [int(path.stem) for path in validations_after(tmp_path, 50)] == [60, 70]
    compared = side_by_side(tmp_path, num_prompts=1, num_versions=3)
    assert [sample.step for sample in compared] == [0, 60, 70]


def test_control_characters_reach_no_terminal_and_no_markup_is_obeyed():
    assert printable("a\tb\n\x1b[31m\x9b\u202e") == "a\tb\n\\x1b[31m\\x9b\\u202e"
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system=None, width=200)
    sample = make_sample(text=NASTY, environment=NASTY, answer=NASTY, prompt=NASTY)
    console.print(rendered(sample, 500))
    shown = output.getvalue()
    assert "[bold]" in shown
    assert {c for c in shown if ord(c) < 32 or 126 < ord(c) < 160} == {"\n"}
    assert "\u202e" not in shown


def test_the_page_and_the_tables_escape_what_the_model_wrote(tmp_path):
    config = make_run(tmp_path)
    file = SampleFile(config.run.path, 1, 10_000)
    file.append([make_sample(text=NASTY, prompt=NASTY, environment=NASTY)])
    write_validation(config.run.path, 4, [make_sample(4, text=NASTY)], keep=2)
    write_page(config)
    page = (config.run.path / "report.html").read_text()
    assert page.count("\\u003cscript>") == 4
    assert page.count("<script") == page.count("</script") == 2
    assert "\x1b" not in page
    table = markdown_table(
        TRAINED, [{"messages": [{"role": "assistant", "content": NASTY}], "step": 1}]
    )
    assert len(table.splitlines()) == 3
    assert "<script" not in table
    assert "\\|" in table


def test_the_rows_of_a_table_have_one_cell_a_column_and_bounded_texts():
    ((step, prompt, response, *others),) = rows(
        TRAINED,
        [{"step": 1, "prompt": "p" * 9000, "messages": [{"role": "assistant", "content": "r"}]}],
    )
    assert (step, response, len(others)) == (1, "r", len(TRAINED) - 3)
    assert len(prompt) < 2100


def test_a_table_has_what_was_expected_what_was_read_each_reward_and_no_markup():
    line = msgspec.to_builtins(make_marked(rewards={"math": 0.0, "format": 1.0}))
    columns = columns_of(HELD_OUT, [line])
    ((index, prompt, answer, version, *response),) = rows(columns, [line])
    assert columns[-3:] == ["reward", "reward/math", "reward/format"]
    assert (index, prompt, answer, version) == (3, "What is 4 + 5?", "9", 0)
    assert response == ["so 7", "7", 0.0, 0.0, 1.0]
    alone = msgspec.to_builtins(make_marked(rewards={"math": 0.0}))
    assert columns_of(TRAINED, [alone]) == list(TRAINED)


def test_the_page_and_the_live_view_show_what_was_read_and_no_markup(tmp_path):
    config = make_run(tmp_path)
    sample = make_marked(rewards={"math": 0.0, "format": 1.0})
    (message,) = sample.messages
    weighed = structs.replace(message, token_lengths=(3, 1, 10), weights=(1.0, 0.5, 2.0))
    file = SampleFile(config.run.path, 1, 10_000)
    file.append([structs.replace(sample, messages=(weighed,))])
    (section,) = page_data(config, [])["samples"]
    (found,) = section["samples"]
    assert found["verdict"] == "expected 9, extracted 7, math 0, format 1"
    assert found["prompt"] == "What is 4 + 5?"
    assert found["messages"][0] == {
        "role": "assistant",
        "pieces": [("so ", 1.0), ("7", 0.5)],
        "rest": "",
    }
    said = shown([newest_sample(config.run.path)])
    assert "expected 9, extracted 7, math 0, format 1" in said
    assert "<|im" not in said


def test_the_view_shows_the_siblings_of_the_newest_step_in_turn(tmp_path, monkeypatch):
    config = make_run(tmp_path)
    file = SampleFile(config.run.path, 1, 10**6)
    file.append([make_sample(1, text="older")])
    file.append([make_sample(2, text=text) for text in ("first", "second")])
    said = []
    for now_s in (0.0, 4.0, 8.0):
        monkeypatch.setattr("time.monotonic", lambda now_s=now_s: now_s)
        said.append(shown([newest_sample(config.run.path)]))
    assert ["second" in text for text in said] == [True, False, True]
    assert ["first" in text for text in said] == [False, True, False]


def test_the_page_shows_different_prompts_of_the_newest_steps(tmp_path):
    config = make_run(tmp_path)
    file = SampleFile(config.run.path, 1, 10**6)
    groups = [(step, prompt) for step in range(1, 21) for prompt in (2 * step, 2 * step + 1)]
    for step, prompt in groups:
        file.append([make_sample(step, prompt_index=prompt, sibling=i) for i in range(8)])
    (section,) = page_data(config, [])["samples"]
    titles = [sample["title"] for sample in section["samples"]]
    assert titles == [f"step {s}, prompt {p}, reward 0" for s, p in reversed(groups)][:24]


def test_the_files_are_bounded_and_lose_the_oldest_samples(tmp_path):
    file = SampleFile(tmp_path, 1, 4000)
    for step in range(1, 101):
        file.append([make_sample(step, text="x" * 100)])
    kept = [sample.step for sample in newest_first(tmp_path)]
    assert kept == list(range(100, 100 - len(kept), -1))
    assert 4 < len(kept) < 20
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000


def test_a_resumed_learner_removes_the_samples_of_the_steps_that_it_makes_again(tmp_path):
    file = SampleFile(tmp_path, 1, 10**6)
    for step in range(1, 8):
        file.append([make_sample(step), make_sample(step)])
    with (tmp_path / "samples.jsonl").open("ab") as torn:
        torn.write(b'{"step": 8, "prom')
    SampleFile(tmp_path, 5, 10**6).append([make_sample(5)])
    assert [s.step for s in read_samples(tmp_path / "samples.jsonl")] == [1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path):
    SampleFile(tmp_path, 1, 10**6).append([make_sample(1)])
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "prom')
    SampleFile(tmp_path, 2, 10**6).append([make_sample(2)])
    assert [sample.step for sample in newest_first(tmp_path)] == [2, 1]


def test_a_full_disk_lets_a_run_go_on_with_the_samples_that_it_had(tmp_path):
    SampleFile(tmp_path, 1, 10**6).append(map(make_sample, range(1, 9)))
    with files_no_larger_than(0):
        SampleFile(tmp_path, 5, 10**6)
    assert [sample.step for sample in newest_first(tmp_path)] == [4, 3, 2, 1]


def test_lines_are_read_from_the_end_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("streamrl.samples.files.BLOCK_BYTES", 64)
    SampleFile(tmp_path, 1, 10**6).append(make_sample(i, text="é" * i) for i in range(1, 40))
    assert [sample.step for sample in newest_first(tmp_path)] == list(range(39, 0, -1))


def test_a_choice_meets_all_its_conditions():
    samples = [make_sample(step, step / 10, f"reply {step}") for step in range(9, 0, -1)]

    def steps(*given: str) -> list[int]:
        return [sample.step for sample in chosen(samples, parse(["samples", "run", *given]))]

    assert steps("--limit=2") == [9, 8]
    assert steps("--step=3-4") == [4, 3]
    assert steps("--min-reward=0.5", "--max-reward=0.6") == [6, 5]
    assert steps("--best", "--limit=1") == [9]
    assert steps("--worst", "--limit=2", "--min-reward=0.3") == [3, 4]
    assert steps("--environment=another") == []


def test_the_command_prints_what_is_asked_for_and_refuses_the_rest(tmp_path, capsys):
    config = make_run(tmp_path)
    file = SampleFile(config.run.path, 1, 10**6)
    file.append([make_sample(1, 0.0, "wrong"), make_sample(2, 1.0, "right \x1b[31m")])
    run = str(config.run.path)
    for version in ([], ["all"]):
        assert main(["samples", run, "--validation", *version]) == 2
        assert "no responses of a validation; validation.every says" in capsys.readouterr().err
    write_validation(config.run.path, 4, [make_sample(4, 0.25, "held out")], keep=2)
    assert main(["samples", run, "--min-reward", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "right \\x1b[31m" in shown
    assert "wrong" not in shown
    assert main(["samples", run, "--grep", "^wr", "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1]
    assert main(["samples", run, "--validation"]) == 0
    assert "held out" in capsys.readouterr().out
    for arguments, sentence in (
        (["--step", "x"], "--step: was 'x'; it must be a step or a range, such as 10-20"),
        (["--step", "3-1"], "--step: was '3-1'; the last step must not be below the first"),
        (["--grep", "("], "--grep: '(' is no regular expression"),
        (["--validation", "7"], "there are no responses of version 7, but of 4"),
    ):
        assert main(["samples", run, *arguments]) == 2
        assert sentence in capsys.readouterr().err


def step_samples(policy_version: int = 4) -> StepSamples:
    groups = [structs.replace(group, answer="9") for group in make_groups(num_groups=3)]
    n = groups[1].trajectories[2].num_response_tokens
    return StepSamples(policy_version, groups, {(1, 2): np.full(n, 0.9, np.float32)})


def make_writer(tmp_path, monkeypatch, decode=letters, tables=None, **samples: object):
    monkeypatch.setattr("learners.samples.open_decoder", lambda model: Decoder(decode))
    config = make_config(
        run={"folder": tmp_path, "name": "run"}, tracking={"samples": {"num_groups": 3, **samples}}
    )
    config.run.path.mkdir(exist_ok=True)
    return SampleWriter(config, 0, lambda *table: tables.append(table))


def test_the_samples_of_a_step_have_its_staleness_and_importance_weights(tmp_path, monkeypatch):
    tables: list[object] = []
    writer = make_writer(tmp_path, monkeypatch, tables=tables, table_every=5)
    writer.add(step_samples(4))
    writer.add(step_samples(5))
    writer.close()
    samples = list(read_samples(tmp_path / "run" / "samples.jsonl"))
    groups = step_samples().groups
    assert {s.answer for s in samples} == {"9"}
    assert len(samples) == 2 * sum(len(group.trajectories) for group in groups)
    weighed = [s for s in samples if s.importance_weights is not None and s.step == 5]
    assert [(s.prompt_index, s.sibling) for s in weighed] == [(1, 2)]
    oldest = groups[1].trajectories[2].oldest_version
    assert (weighed[0].version, weighed[0].staleness) == (oldest, 4 - oldest)
    ((table, step),) = tables
    assert (step, table[0]["step"]) == (5, 5)


def test_each_token_that_the_policy_wrote_has_its_weight():
    trajectory = make_trajectory((False, "ask"), (True, "ab"), (False, "re"), (True, "c"))
    weights = np.array([0.5, 1.25, 2.00049], np.float32)
    sample = sample_of(
        trajectory, Decoder(letters), weights, step=1, prompt_index=1, sibling=0, environment="e"
    )
    assert [(m.content, m.token_lengths, m.weights) for m in sample.messages] == [
        ("ab", (1, 1), (0.5, 1.25)),
        ("re", (), ()),
        ("c", (1,), (2.0,)),
    ]
    assert sample.importance_weights is not None
    assert sample.importance_weights.max == pytest.approx(2.00049)
    line = msgspec.to_builtins(sample)
    assert line["messages"][1] == {"role": "environment", "content": "re"}
    assert msgspec.json.decode(json.dumps(line).encode(), type=Sample) == sample


def test_weights_of_other_tokens_are_left_out():
    trajectory = make_trajectory((False, "ask"), (True, "ab"))
    facts = {"step": 1, "prompt_index": 1, "sibling": 0, "environment": "e"}
    sample = sample_of(trajectory, Decoder(letters), np.ones(3, np.float32), **facts)
    assert sample.importance_weights is None
    assert sample.messages == (Message("assistant", "ab"),)


def of_bytes(token_ids) -> str:
    """A tokenizer of bytes, which may end within a character."""
    return bytes(token_ids).decode(errors="replace")


def without_first_space(token_ids) -> str:
    """As those of Llama do."""
    return of_bytes(token_ids).removeprefix(" ")


@pytest.mark.parametrize("decode", [of_bytes, without_first_space])
@pytest.mark.parametrize("text", ["", "plain text", "a \u00e9 b", "\U0001f600!", " x  y "])
def test_pieces_are_the_characters_of_the_tokens(decode, text):
    token_ids = list(text.encode())
    shown = decode(token_ids)
    lengths = piece_lengths(token_ids, shown, decode)
    assert len(lengths) == len(token_ids)
    assert sum(lengths) == len(shown)
    assert lengths.count(0) == len(token_ids) - len(shown)


def test_pieces_are_bounded_and_empty_where_the_tokens_are_not_the_text():
    assert len(piece_lengths([97] * 5000, "a" * 5000, of_bytes)) == MAX_TOKENS
    assert piece_lengths([97, 98], "ba", of_bytes) == ()


def test_a_step_waits_for_no_sample(tmp_path, monkeypatch):
    may_go_on = threading.Event()

    def slow(token_ids) -> str:
        assert may_go_on.wait(120)
        return letters(token_ids)

    writer = make_writer(tmp_path, monkeypatch, slow, [])
    for version in range(MOST_WAITING + 3):
        writer.add(step_samples(version))
    may_go_on.set()
    writer.close()
    steps = {sample.step for sample in read_samples(tmp_path / "run" / "samples.jsonl")}
    assert steps == set(range(1, MOST_WAITING + 1))


def test_a_model_without_a_tokenizer_costs_the_samples_alone(tmp_path, caplog):
    model = {"path": str(tmp_path / "none")}
    config = make_config(run={"folder": tmp_path, "name": "run"}, model=model)
    config.run.path.mkdir()
    writer = SampleWriter(config, 0, lambda *_: None)
    writer.add(step_samples())
    writer.close()
    assert "step 5 has no samples" in caplog.text


def test_a_tokenizer_that_fails_costs_the_samples_alone(tmp_path, monkeypatch, caplog):
    """Its code may be the model's own, and raise anything."""

    def unknown(token_ids) -> str:
        raise KeyError(token_ids[0])

    writer = make_writer(tmp_path, monkeypatch, unknown)
    writer.add(step_samples())
    writer.close()
    assert "step 5 has no samples: KeyError" in caplog.text


@pytest.mark.parametrize("num_groups", [0, 1])
def test_no_more_groups_are_kept_than_asked_for(tmp_path, monkeypatch, num_groups):
    writer = make_writer(tmp_path, monkeypatch, tables=[], num_groups=num_groups)
    writer.add(step_samples())
    writer.close()
    samples = read_samples(tmp_path / "run" / "samples.jsonl")
    assert len({sample.prompt_index for sample in samples}) == num_groups
