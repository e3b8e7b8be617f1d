"""`validation` takes what can act, and names both settings of what cannot."""

from typing import Any

import pytest
from pydantic import ValidationError

from streamrl.config import RunConfig
from streamrl.config.loading.explain import explain
from streamrl.config.loading.load import load_config, load_usable
from streamrl.errors import ConfigError


def make(validation: dict[str, Any], **sections: Any) -> RunConfig:
    given = {"model": {"path": "m"}, "data": {"source": "copy"}, **sections}
    return RunConfig.model_validate({**given, "validation": validation})


@pytest.mark.parametrize(
    ("validation", "sections", "sentence"),
    [
        (
            {"every": 5, "num_samples": 4},
            {},
            "validation.num_samples 4 with validation.temperature 0 samples the same response",
        ),
        (
            {"every": 5},
            {"weights": {"publish_every": 2}, "buffer": {"max_staleness": 2}},
            "validation.every 5 is no multiple of weights.publish_every 2",
        ),
        (
            {"every": 5, "num_prompts": 300},
            {},
            "validation.num_prompts 300 is more than data.num_eval_prompts 256",
        ),
        (
            {"generator": {"max_num_seq": 3}},
            {},
            "validation.generator.max_num_seq: unknown key; did you mean 'max_num_seqs'?",
        ),
        ({"generator": {"max_num_seqs": 0}}, {}, "validation.generator.max_num_seqs: was 0"),
        (
            {"generator": {"temperature": 1}},
            {},
            "validation.generator.temperature: has no effect there; set validation.temperature",
        ),
        (
            {"generator": {"temperature": 1, "max_num_seq": 3}},
            {},
            "set validation.temperature\nvalidation.generator.max_num_seq: unknown key",
        ),
        (
            {"generator": {"max_in_flight": 8}},
            {},
            "unknown key; did you mean generator.episode.max_in_flight?",
        ),
        (
            {"every": 5},
            {"generator": {"engine": "vllm", "vllm": {"url": "http://there:80"}}},
            "http://there:80 is the server of the generators",
        ),
        ({"early_stop": {"patience": 2}}, {}, "patience 2 needs validations"),
        (
            {},
            {"learner": {"checkpoint": {"keep_best": 1, "best_by": "validation/mean@1"}}},
            "best_by validation/mean@1 needs validation.every as a number, such as 50",
        ),
        (
            {"every": 7},
            {"learner": {"checkpoint": {"keep_best": 1, "best_by": "validation/mean@1"}}},
            "validation.every 7 and learner.checkpoint.every 50 rarely meet",
        ),
    ],
)
def test_what_cannot_act_is_refused(validation, sections, sentence):
    with pytest.raises(ValidationError) as refused:
        make(validation, **sections)
    assert sentence in str(explain(refused.value, RunConfig))


ENTRY = "environments=[{name: a, environment: single_turn, data: {truncation: x, sourc: y}}]"


@pytest.mark.parametrize(
    "settings",
    [
        ["validation.generator.top_p=0.5", "validation.generator.vllm.url=abc"],
        ["generator.count=abc", "validation.generator.max_num_seq=1"],
        ["generator.count=abc", ENTRY],
        [ENTRY, "validation.generator.max_num_seq=1"],
        [ENTRY, "validation.generator.vllm=null"],
    ],
)
def test_what_is_left_of_refused_settings_can_be_read(settings, tmp_path):
    (tmp_path / "run.yaml").write_text("{model: {path: m}, data: {source: copy}}")
    loaded, refusal = load_usable(tmp_path / "run.yaml", settings, {})
    assert refusal is not None
    rest = loaded.config
    assert rest.validation.engine_settings(rest.generator).engine == "hf"
    assert [entry.data.truncation for entry in rest.entries] == ["error"]


def test_keys_of_mcp_servers_are_not_shown():
    servers = [
        {"url": "http://there", "headers": {"Authorization": "a key"}},
        {"command": ["server"], "environment": {"TOKEN": "a key"}},
    ]
    config = make({"generator": {"mcp_servers": servers}}, generator={"mcp_servers": servers})
    for exclude_defaults in (True, False):
        shown = config.shown(exclude_defaults=exclude_defaults)
        assert shown["validation"]["generator"]["mcp_servers"][0] == {"url": "http://there"}
        assert "a key" not in str(shown)


def test_the_validator_has_the_generators_settings_but_for_its_own():
    config = make(
        {
            "every": 5,
            "num_samples": 4,
            "num_prompts": 10,
            "temperature": 0.6,
            "max_new_tokens": 99,
            "generator": {"vllm": {"url": "http://own:80"}, "max_num_seqs": 8},
        },
        generator={
            "engine": "vllm",
            "top_k": 7,
            "environment": "own.py:Game",
            "vllm": {"url": "http://there:80", "pause_mode": "abort"},
        },
    )
    own = config.for_validator()
    generator = own.generator
    assert (generator.url, generator.vllm.pause_mode) == ("http://own:80", "abort")
    assert (generator.temperature, generator.top_k, generator.max_new_tokens) == (0.6, 0, 99)
    assert (generator.group_size, generator.max_num_seqs) == (4, 8)
    assert (generator.environment, own.data.num_eval_prompts) == ("own.py:Game", 10)
    assert config.generator.url == "http://there:80"


HELD_OUT = {"data": {"source": "train.jsonl", "eval_source": "held_out.jsonl"}}


@pytest.mark.parametrize(
    ("validation", "sections", "is_validated"),
    [
        ({}, HELD_OUT, True),
        ({}, {}, False),
        ({"every": 0}, HELD_OUT, False),
        ({"every": "auto"}, {}, True),
        ({"every": 3}, {}, True),
        ({}, {**HELD_OUT, "generator": {"engine": "vllm"}}, False),
        ({}, {**HELD_OUT, "generator": {"environment": "agent"}}, False),
    ],
)
def test_a_run_with_prompts_to_hold_out_is_validated_unless_it_is_told_otherwise(
    validation, sections, is_validated
):
    assert make(validation, **sections).is_validated is is_validated


def test_a_validator_rests_nineteen_times_as_long_as_a_validation_took():
    automatic, fixed = make({"every": "auto"}).validation, make({"every": 4}).validation
    assert automatic.rest_s(10.0) == pytest.approx(190.0)
    assert (automatic.next_version(0), automatic.next_version(6)) == (1, 7)
    assert (fixed.rest_s(10.0), fixed.next_version(0), fixed.next_version(6)) == (0.0, 4, 8)


@pytest.mark.parametrize(
    ("validation", "is_alike"),
    [
        ({}, True),
        ({"every": 5, "generator": {"device": "cpu", "max_num_seqs": 2}}, True),
        ({"every": 0}, False),
        ({"at_end": False}, False),
        ({"num_samples": 4, "temperature": 0.8}, False),
        ({"num_prompts": 8}, False),
        ({"max_new_tokens": 3}, False),
        ({"generator": {"dtype": "bfloat16"}}, False),
    ],
)
def test_the_last_validation_is_the_evaluation_where_it_samples_the_same(validation, is_alike):
    assert make(validation, **HELD_OUT).final_is_validated is is_alike


def test_what_may_be_a_number_or_a_word_is_refused_in_one_sentence():
    with pytest.raises(ConfigError) as refused:
        load_config("configs/quickstart.yaml", ["validation.every=-1"], {})
    assert str(refused.value) == (
        "validation.every: was -1; input should be greater than or equal to 0, or 'auto'; verl's "
        "-1 is 0 here (--set validation.every)"
    )
