"""`validation` takes what can act, and names both settings of what cannot."""

from typing import Any

import pytest

from streamrl.config import RunConfig


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
            "generator has no 'max_num_seq'; did you mean 'max_num_seqs'?",
        ),
        ({"generator": {"max_num_seqs": 0}}, {}, "validation.generator: max_num_seqs was 0"),
        (
            {"generator": {"temperature": 1}},
            {},
            "temperature has no effect there; set validation.temperature",
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
            "best_by validation/mean@1 needs validation.every",
        ),
        (
            {"every": 7},
            {"learner": {"checkpoint": {"keep_best": 1, "best_by": "validation/mean@1"}}},
            "validation.every 7 and learner.checkpoint.every 50 rarely meet",
        ),
    ],
)
def test_what_cannot_act_is_refused(validation, sections, sentence):
    with pytest.raises(ValueError, match="Value error") as refused:
        make(validation, **sections)
    assert sentence in str(refused.value)


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
